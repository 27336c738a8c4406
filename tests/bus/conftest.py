"""Give the tests of this folder the fixture of trainings, and prompt deliveries."""

from tests.support.keeper import prompt_keeper
from tests.support.trainers import make_trainer

__all__ = ["make_trainer", "prompt_keeper"]
