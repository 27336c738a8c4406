"""Decide which checkpoints of a directory are kept, and which of them are the best.

Start with `retention`, the record of a `CheckpointHook`; `best` compares scores, `pending` tracks the running
saves, and `run_directory` compares a run with the checkpoints on its disk. They may import the rest of
`eventloop.checkpoint` and what it may import.
"""
