"""Copy and compare lists, dicts, sets and tuples without touching the objects in them; hooks use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAPPINGS, SEQUENCES = (dict, Mapping), (list, tuple)
"""The types for `isinstance` to find containers. A save makes hundreds of these tests: with `dict` before the
abstract class, the test of a dict takes a tenth of the time."""


def copied(value: Any) -> Any:
    """Return a value with its lists, dicts, sets and tuples copied; other objects in them stay the same.

    copied({"a": [1], "model": model})
    """
    if type(value) in (list, tuple, set):
        return type(value)(map(copied, value))
    if type(value) is dict:
        return {key: copied(each) for key, each in value.items()}
    return value


def same_objects(a: Any, b: Any) -> bool:
    """Return whether two values hold the same objects, or equal numbers and strings, in equal containers."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(same_objects, a, b))
    if type(a) is dict:
        return bool(a.keys() == b.keys()) and all(same_objects(a[key], b[key]) for key in a)
    return type(a) in (set, str, bytes, int, float, bool) and bool(a == b)
