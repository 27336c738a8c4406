"""Start child processes and exchange messages with them over pipes.

Start with `child`, which starts the worker process of a background subscriber. `launch` builds the command
line of this and other children, such as the process that saves checkpoints. `channel` splits the bytes of a
pipe into messages, `cpu_time` shows whether a child makes progress, `exiting` shortens the exit of the
interpreter, and `dry_run` recognises `eventloop plan`. The package may import `costs`, `events` and `util`.
"""
