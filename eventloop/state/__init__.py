"""Check and restore the states of objects: layouts of a checkpoint's values, sharded tensors, rollback.

Start with `schema`, which lists every key of a checkpoint that can be resumed from.
"""
