"""Check and restore the states of objects: the layout of checkpoints, sharded tensors, rollback.

Start with `schema`, which lists every key of a checkpoint that can be resumed from; `keys` names the required
ones. `rollback` undoes a load that fails, and `undo` the changes of a block. `exchange` sends decisions and
errors between ranks. `sharded` handles tensors of which each rank holds a part, and `sharded_copy` copies a
model of such tensors. `plain_values` converts a state to values that can be saved, `remembered` saves the
states of a program's own variables, `containers` copies lists and dicts, and `tensors` finds the tensors in
them. The package may import the registry, the bus and the packages below them.
"""
