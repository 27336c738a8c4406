"""Name the keys of a checkpoint that can be resumed from. This module imports no torch."""

NEEDED = ("meta", "optimizer", "param_schedulers", "hooks", "rng")
"""The keys that a checkpoint must have in addition to the weights, so that a run can resume from it."""
