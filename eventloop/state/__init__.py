"""Check and restore the states of objects: the layout of checkpoints, sharded tensors, rollback.

Start with `schema`, which lists every key of a checkpoint that can be resumed from; `keys` names the required
ones. `rollback` undoes a load that fails, `sharded` refuses tensors that are spread over ranks, and `tensors`
counts bytes. The package may import the registry, the bus and the packages below them.
"""
