"""Decide which checkpoints of a directory are kept, and which of them is the best.

Start with `kept`, which names the checkpoints to remove.
"""
