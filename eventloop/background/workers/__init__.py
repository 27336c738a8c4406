"""Run a subscriber in a worker process of its own.

Start with `subscriber`, the training process's side; `worker` is the program of the process, and `protocol`
their messages. `importable` packs the handler, `in_flight` and `restarts` handle a worker's death. May import
what `eventloop.background` may.
"""
