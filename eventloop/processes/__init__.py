"""Start child processes and exchange messages with them over pipes.

Start with `child`, which runs the worker process of a background subscriber. `launch` builds the command line
of a child, also for the process that saves checkpoints; `channel` cuts a pipe's bytes into messages. May
import `costs`, `events` and `util`.
"""
