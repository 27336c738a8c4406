"""Decide which checkpoints of a directory are kept, and which of them are the best.

Start with `kept`, which names the checkpoints that `max_keep_ckpts` removes; `bests` does the same for
`keep_best`. `CheckpointHook` is built from these modules. They may import the rest of `eventloop.checkpoint`
and what it may import.
"""
