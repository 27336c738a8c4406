"""Run a subscriber in a worker process of its own.

Start with `subscriber`, the side of the training process; `worker` is the program of the process.
"""
