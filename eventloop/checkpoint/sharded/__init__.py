"""Write and read checkpoints of models that are sharded over ranks, as DTensors are.

All ranks write into one directory, which rank 0 completes and renames once every rank has voted. `part` is a
rank's part of a save, `votes` the votes; both run in the saver's process. `plan` decides which rank writes
which chunk, `session` prepares a run's saves, `reader` reads a checkpoint on any number of ranks, and `load`
fills the tensors of a program. These modules may import what `eventloop.checkpoint` may import; `part` and
`votes` import only the standard library.
"""
