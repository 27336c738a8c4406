"""Run a subscriber in its own worker process.

Start with `process_runner`, which runs in the training process. `worker` is the program of the worker
process, and `protocol` encodes the messages between them. `importable` encodes the handler. `in_flight` and
`restarts` resend events and start another worker if a worker dies. The package may import the packages that
`eventloop.background` may.
"""
