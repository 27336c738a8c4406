"""Convert and count the values that a writer of an experiment tracker is given.

`eventloop.writers.tracker` uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Tally:
    """Count values as new to a tracker or as known to it.

    Each step of a name counts once, although a resumed training or a replay repeats it.

    Args:
        found: the last step that the tracker has of each name.
    """

    def __init__(self, found: Mapping[str, int]) -> None:
        self.new = self.known = 0
        self._found = dict(found)
        self._counted: dict[str, int] = {}

    def count(self, name: str, step: int) -> None:
        """Count the value of a name at a step."""
        if self._counted.get(name, -1) >= step:
            return
        self._counted[name] = step
        known = step <= self._found.get(name, -1)
        self.known += known
        self.new += not known


def number_of(value: Any) -> float | None:
    """Return a value, or a scalar of numpy, as a number; None if it is not one."""
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(value.item())
    except Exception:
        return None
