"""Give the tests of this folder the fixtures of trainings and of a fake device."""

from tests.support.cuda import device
from tests.support.trainers import ended, make_trainer

__all__ = ["device", "ended", "make_trainer"]
