"""Gather a trainer's state for a checkpoint, and restore it on a resume.

Start with `restoring`, which loads a checkpoint, and `gathering`, which collects what a checkpoint holds.
`state` records what a trainer has loaded, and where it saves. `choice` finds a checkpoint by its path or
name, and lets all ranks read the checkpoint that rank 0 has chosen. `checking` checks that a trainer can
continue from a checkpoint: `by_name` brings the saved states of optimizers into the order of the trainer's
parameters, `settings` compares the settings of the two runs, and `setting_changes` decides which differences
are refused. `loading` loads the hooks, the position in the loader and the random states. `apply` continues
with this trainer's settings where they differ, and `fast_forward` steps its schedules. `protocols` declares
the parts of a trainer that a resume needs. The package may import `checkpoint`, `data`, `optim`, `state` and
the packages that these import.
"""
