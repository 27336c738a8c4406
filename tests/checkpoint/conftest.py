"""Give the tests of this folder the fixtures of savers and trainers."""

from tests.support.trainers import ended, gate, late, make_saver, make_trainer

__all__ = ["ended", "gate", "late", "make_saver", "make_trainer"]
