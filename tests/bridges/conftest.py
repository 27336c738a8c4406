"""Give the tests of this folder the fixtures of trainings."""

from tests.support.trainers import default_handlers, make_trainer

__all__ = ["default_handlers", "make_trainer"]
