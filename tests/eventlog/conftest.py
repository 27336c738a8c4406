"""The trainers that tests of event logs run."""

from tests.support.trainers import make_trainer

__all__ = ["make_trainer"]
