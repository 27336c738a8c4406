"""Check and restore the states of objects: layouts of checkpoints, sharded tensors, rollback.

Start with `schema`, which lists every key of a checkpoint that can be resumed from. The package may import
the registry, the bus and the packages below them.
"""
