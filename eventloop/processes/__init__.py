"""Start a child process and talk to it over pipes.

Start with `child`. Worker processes of subscribers and the process that saves checkpoints stand on it.
Imports only `util`.
"""
