"""Give the tests of this folder the fixtures of trainings."""

from tests.support.trainers import (
    default_handlers,
    ended,
    gate,
    make_saver,
    make_trainer,
    reads,
    received,
    stuck,
)

__all__ = ["default_handlers", "ended", "gate", "make_saver", "make_trainer", "reads", "received", "stuck"]
