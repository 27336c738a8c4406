"""Gather a trainer's state for a checkpoint, and restore it on a resume.

Start with `state`. `settings` compares the settings of the two runs, and `setting_changes` describes the
differences for the log. `by_name` arranges states that know parameters by their place. `base_values` finds
edited learning rates, and `fast_forward` steps schedules whose arguments changed. `model_settings` compares
the types of buffers and which parameters train. `hook_states` loads the hooks' states, and `ranks` gathers
the state of all ranks. `resolve_path` finds a checkpoint by its name, and `choice` lets all ranks read the
one of rank 0. `protocols` declares the parts of a trainer that a resume needs. The package may import
`checkpoint`, `data`, `optim`, `state` and the packages that these import.
"""
