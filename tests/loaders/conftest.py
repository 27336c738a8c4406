"""Give the tests of this folder the fixtures of trainings."""

from tests.support.trainers import make_trainer

__all__ = ["make_trainer"]
