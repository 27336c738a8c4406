"""Name the keys of a checkpoint that can be resumed from. This module imports no torch."""

SHARDED = ("state_dict", "ema_state_dict", "optimizer")
"""The keys of a checkpoint whose tensors may be sharded over ranks."""
NEEDED = ("meta", "optimizer", "param_schedulers", "hooks", "rng")
"""The keys that a checkpoint must have in addition to the weights, so that a run can resume from it."""
