"""Gather a trainer's state for a checkpoint, and restore it on a resume.

Start with `state`. `settings` compares the settings of the two runs, `setting_changes` describes the
differences, `fast_forward` steps schedules whose arguments changed, `ranks` gathers the state of all ranks,
and `resolve_path` finds the checkpoint that a name means. `protocols` declares the parts of a trainer that a
resume needs. The package may import `checkpoint`, `data`, `optim`, `state` and what these import.
"""
