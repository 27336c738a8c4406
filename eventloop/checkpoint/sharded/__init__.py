"""Write and read checkpoints of models that are sharded over ranks, as DTensors are.

All ranks write into one directory. Once every rank has voted, by a file that says that its own files are
durable, rank 0 completes the directory and renames it. `part` writes one rank's part of a save, and `votes`
writes and awaits the votes; both run in the saver's process. `plan` decides which rank writes which chunk of
a tensor, and `session` prepares a run's saves. `reader` reads a checkpoint on any number of ranks, and `load`
fills the tensors of a program. These modules may import what `eventloop.checkpoint` may import; `part` and
`votes` import only the standard library.
"""
