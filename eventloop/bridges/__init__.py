"""Bring the bus into the loop of another engine, and the hooks of other engines into this one.

Start with `driven`, the trainer that such an engine drives; each other module is for one engine, which it
imports. `optuna` makes a training a trial of an Optuna study. May import everything but `cli`.
"""

from eventloop.bridges.driven import DrivenTrainer

__all__ = ["DrivenTrainer"]
