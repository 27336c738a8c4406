"""Use the bus in the loop of another engine, and the callbacks of other engines in this engine's trainer.

Start with `driven`: its trainer emits the events of a training whose loop another engine runs. Each
subpackage serves one engine, and imports it. `optuna` makes a training a trial of an Optuna study. May import
all packages except `cli`.
"""

from eventloop.bridges.driven import DrivenTrainer

__all__ = ["DrivenTrainer"]
