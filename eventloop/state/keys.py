"""Name the keys of a checkpoint that can be resumed from. This module imports no torch."""

NEEDED = ("meta", "optimizer", "param_schedulers", "hooks", "rng")
"""The keys that a checkpoint must have besides the weights to be resumed from."""
