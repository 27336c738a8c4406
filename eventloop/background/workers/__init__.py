"""Run a subscriber in its own worker process.

Start with `process_runner`, the training process's side. `worker` is the program of the worker process, and
`protocol` defines their messages. `importable` packs the handler; `in_flight` and `restarts` handle a
worker's death. May import what `eventloop.background` may.
"""
