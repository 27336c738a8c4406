"""Start child processes and exchange messages with them over pipes.

Start with `child`, which starts the worker process of a background subscriber. `launch` builds the command
line of a child, also of the process that saves checkpoints. `channel` cuts a pipe's bytes into messages,
`cpu_time` shows whether a child makes progress, `exiting` makes an exit short, and `dry_run` recognises
`eventloop plan`. The package may import `costs`, `events` and `util`.
"""
