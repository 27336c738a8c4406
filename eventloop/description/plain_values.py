"""Convert settings to values that JSON can represent. This module imports no torch.

The trainer uses it for the user's configuration in `run.json`, which may contain any object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from os import PathLike
from typing import Any

from eventloop.util.surrogates import escaped

DEEPEST = 8
"""How many levels of nested mappings and lists are kept; deeper ones become texts."""
LONGEST = 200
"""The largest number of characters of the text that stands for an object."""


def plain_value(value: Any, depth: int = 0) -> Any:
    """Convert a value to None, bool, str, int, float, or lists and dicts of these.

    A path becomes a str. Any other object becomes its `repr`, cut to `LONGEST` characters, and so do NaN,
    infinities and integers of more than 63 bits.

    Args:
        depth: the number of mappings and lists around the value.
    """
    match value:
        case None | bool():
            return value
        case str():
            return escaped(str(value))
        case int() if abs(value) < 1 << 63:
            return int(value)
        case float() if isfinite(value):
            return float(value)
        case Mapping() if depth < DEEPEST:
            return {escaped(str(key)): plain_value(item, depth + 1) for key, item in value.items()}
        case list() | tuple() if depth < DEEPEST:
            return [plain_value(item, depth + 1) for item in value]
        case PathLike():
            return escaped(str(value))
    text = escaped(repr(value))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with names such as "optimizer.lr"; a list is one value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
