"""Use the bus in the loop of another engine, and the callbacks of other engines in this engine's trainer.

Start with `driven`, the trainer whose events such an engine's loop emits. Each subpackage serves one engine,
which it imports. `optuna` makes a training a trial of an Optuna study. May import everything but `cli`.
"""

from eventloop.bridges.driven import DrivenTrainer

__all__ = ["DrivenTrainer"]
