"""Give the tests of this folder the fixture of trainers."""

from tests.support.trainers import ended, make_trainer

__all__ = ["ended", "make_trainer"]
