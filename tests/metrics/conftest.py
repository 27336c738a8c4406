"""Give the tests of this folder the fixture of a fake device."""

from tests.support.cuda import device

__all__ = ["device"]
