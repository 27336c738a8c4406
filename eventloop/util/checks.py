"""Check arguments of hooks, writers and the trainer, with the same errors everywhere."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from os import PathLike
from typing import Any

from eventloop.util.suggest import near, suggest


def check_bools(**options: object) -> None:
    """Refuse options that are neither True nor False, such as the text "no", which Python takes as true.

    Raises:
        TypeError: an option has another value; the message names both.
    """
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def check_optional_bools(**options: object) -> None:
    """Raise TypeError for an option that is not True, False or None."""
    for name, value in options.items():
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"{name} must be True, False or None, got {value!r}")


def check_choice(name: str, value: object, words: Collection[object]) -> None:
    """Raise ValueError if `value` is not in `words`; the message lists them, and suggests the nearest."""
    if value not in words:
        choice = " or ".join(map(repr, words))
        raise ValueError(f"{name} must be {choice}, got {value!r}{near(str(value), map(str, words))}")


def check_keys(what: str, given: Iterable[object], known: Iterable[str]) -> None:
    """Raise ValueError for the first given key that is not known; the message suggests the nearest one.

    Args:
        what: the name of the object that takes the keys, which begins the message.
        given: the keys that a user has given.
        known: the keys that are allowed.
    """
    allowed = [*known]
    for key in given:
        if key not in allowed:
            raise ValueError(f"{what} has no argument {key!r}{suggest(str(key), allowed)}")


def check_metric(name: str, value: object) -> None:
    """Raise TypeError if `value`, given for the argument `name`, is not a non-empty string."""
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name} must be the name of a metric, got {value!r}")


def strings(name: str, value: object, *, repeated: bool = False) -> list[str]:
    """Return an option, which may be a string, a list of strings or None, as a list of strings.

    Args:
        name: the name of the option, for messages.
        repeated: whether the list may contain a string twice.

    Raises:
        TypeError: the value is of another type.
        ValueError: the list is empty, or contains a string twice.
    """
    if value is None:
        return []
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not all(isinstance(item, str) for item in values):
        raise TypeError(f"{name} must be a string or a list of strings, got {value!r}")
    if not values or (not repeated and len(set(values)) < len(values)):
        raise ValueError(f"{name} must not be empty or have a name twice, got {value!r}")
    return list(values)


def check_path(name: str, value: object) -> None:
    """Raise TypeError if `value`, given for the argument `name`, is neither a str nor a path object."""
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{name} must be a path, a str or a Path, got {value!r}")


def positive(what: str, value: object) -> None:
    """Refuse a value that is not a positive int.

    Args:
        what: the name of the argument, for the message.

    Raises:
        TypeError: the value is not an int.
        ValueError: the value is below 1.
    """
    at_least(what, value, 1)


def at_least(what: str, value: object, least: int) -> None:
    """Raise TypeError if `value`, given for the argument `what`, is no int, and ValueError below `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{what} must be at least {least}, got {value}")


def positive_or(other: object, name: str, value: object, meaning: str = "") -> None:
    """Raise ValueError if a value is neither `other` nor a positive int.

    Args:
        other: a value that is allowed besides positive ints, such as -1.
        name: the name of the argument, for the message.
        meaning: a text that the message has after `other`, such as " (all)".
    """
    is_positive_int = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value != other and not is_positive_int:
        raise ValueError(f"{name} must be {other!r}{meaning} or a positive int, got {value!r}")


def check_seconds(name: str, value: object, *, zero: bool) -> None:
    """Refuse a value that is not a number of seconds.

    Args:
        name: the name of the argument, for the message.
        value: the value; infinity is allowed.
        zero: whether 0 is allowed.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is negative or nan, or 0 where 0 is not allowed.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}")
    if not (value > 0 or (zero and value == 0)):
        raise ValueError(f"{name} must be {'at least' if zero else 'above'} 0 seconds, got {value}")


def number(
    what: str,
    value: object,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> float:
    """Return `value`, given for the argument `what`, as a float.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is not finite, or beyond one of the bounds that are given.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be a number, got {value!r}")
    if not abs(value) <= sys.float_info.max:  # for a larger int, float() would raise OverflowError
        raise ValueError(f"{what} must be a finite number, got {value!r}")
    bounds = [
        ("above", above, above is None or value > above),
        ("at least", least, least is None or value >= least),
        ("below", below, below is None or value < below),
        ("at most", most, most is None or value <= most),
    ]
    if not all(holds for _, _, holds in bounds):
        expected = " and ".join(f"{word} {bound:g}" for word, bound, _ in bounds if bound is not None)
        raise ValueError(f"{what} must be {expected}, got {value!r}")
    return float(value)


def length_of(loader: Iterable[Any] | None) -> int | None:
    """Return the number of batches in one pass over the loader, or None if the loader has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # Lightning's CombinedLoader has a length only once it is iterated
        return None
