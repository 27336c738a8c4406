"""Give the tests of this folder prompt deliveries."""

from tests.support.keeper import prompt_keeper

__all__ = ["prompt_keeper"]
