"""Check and restore the states of objects: the layout of checkpoints, sharded tensors, rollback.

Start with `schema`, which lists every key of a checkpoint that can be resumed from; `keys` names the required
ones. `rollback` undoes a load that fails, `sharded` refuses, fills or returns a rank's parts of tensors that
are spread over ranks, `sharded_copy` copies those of a model, `plain_values` converts a state to values that
can be saved, `remembered` holds the states of a program's own variables, and `tensors` counts bytes. The
package may import the registry, the bus and the packages below them.
"""
