"""Give the tests of this folder the fixtures of trainings."""

from tests.support.trainers import ended, make_trainer, reads

__all__ = ["ended", "make_trainer", "reads"]
