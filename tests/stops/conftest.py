"""Give the tests of this folder the fixtures of trainings."""

from tests.support.trainers import (
    default_handlers,
    ended,
    gate,
    heard,
    make_saver,
    make_trainer,
    reads,
    stuck,
)

__all__ = ["default_handlers", "ended", "gate", "heard", "make_saver", "make_trainer", "reads", "stuck"]
