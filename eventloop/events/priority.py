"""Define the priorities of synchronous handlers, with the numbers of MMEngine."""

from __future__ import annotations

from difflib import get_close_matches
from enum import IntEnum


class Priority(IntEnum):
    """Named priorities. A lower number runs earlier."""

    HIGHEST = 0
    VERY_HIGH = 10
    HIGH = 30
    ABOVE_NORMAL = 40
    NORMAL = 50
    BELOW_NORMAL = 60
    LOW = 70
    VERY_LOW = 90
    LOWEST = 100


def get_priority(priority: Priority | int | str) -> int:
    """Return a priority as a number in 0..100.

    Args:
        priority: a `Priority`, its name in upper or lower case, or the number itself.

    Raises:
        TypeError, ValueError: `priority` is not one of these.
    """
    if isinstance(priority, str):
        return _by_name(priority)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(
            f"priority must be a Priority, its name or an int in 0..100 (lower runs first), got {priority!r}"
        )
    if not 0 <= priority <= 100:
        raise ValueError(f"priority must be between 0 (runs first) and 100 (runs last), got {priority}")
    return int(priority)


def _by_name(name: str) -> int:
    """Return the number of a named priority; suggest the nearest name for an unknown one."""
    member = Priority.__members__.get(name.strip().upper().replace(" ", "_"))
    if member is not None:
        return int(member)
    if name.strip().isdecimal():
        raise ValueError(f"priority must be an int or a name, got {name!r}: write priority={name.strip()}")
    near = get_close_matches(name.upper(), Priority.__members__, n=1)
    hint = f"did you mean {near[0]}?" if near else f"names are {', '.join(Priority.__members__)}"
    raise ValueError(f"unknown priority name {name!r}: {hint}")
