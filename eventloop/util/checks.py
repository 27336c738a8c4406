"""Check arguments of hooks, writers and the trainer, with the same errors everywhere."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from os import PathLike
from typing import Any

from eventloop.util.suggest import near, suggest


def check_bools(**options: object) -> None:
    """Refuse values other than True and False: "no" or "false" in a config would count as True.

    Raises:
        TypeError: the message names the option and its value.
    """
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def check_optional_bools(**options: object) -> None:
    """Refuse values other than True, False and None."""
    for name, value in options.items():
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"{name} must be True, False or None, got {value!r}")


def check_choice(name: str, value: object, words: Collection[object]) -> None:
    """Refuse a value that is not one of the words; the message lists the words and the nearest one."""
    if value not in words:
        choice = " or ".join(map(repr, words))
        raise ValueError(f"{name} must be {choice}, got {value!r}{near(str(value), map(str, words))}")


def check_keys(what: str, given: Iterable[object], known: Iterable[str]) -> None:
    """Refuse keys that are not known; the message suggests the nearest known key.

    Args:
        what: the name of the object that takes the keys, which begins the message.
        given, known: the keys that were given, and those that are allowed.
    """
    for key in given:
        if key not in (names := [*known]):
            raise ValueError(f"{what} has no argument {key!r}{suggest(str(key), names)}")


def check_metric(name: str, value: object) -> None:
    """Refuse a value that cannot be the name of a metric."""
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name} must be the name of a metric, got {value!r}")


def strings(name: str, value: object, *, repeated: bool = False) -> list[str]:
    """Return an option that is a string or a list of strings as a list; None gives an empty list.

    Args:
        repeated: whether a string may be in the list twice.
    """
    if value is None:
        return []
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not all(isinstance(each, str) for each in values):
        raise TypeError(f"{name} must be a string or a list of strings, got {value!r}")
    if not values or (not repeated and len(set(values)) < len(values)):
        raise ValueError(f"{name} must not be empty or have a name twice, got {value!r}")
    return list(values)


def check_path(name: str, value: object) -> None:
    """Refuse a value that is not a path."""
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{name} must be a path, a str or a Path, got {value!r}")


def positive(what: str, value: object) -> None:
    """Refuse a value that is not a positive int.

    Raises:
        TypeError, ValueError: the message names the argument, `what`, and the value.
    """
    at_least(what, value, 1)


def at_least(what: str, value: object, least: int) -> None:
    """Refuse a value that is not an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{what} must be at least {least}, got {value}")


def positive_or(other: object, name: str, value: object, meaning: str = "") -> None:
    """Refuse a value that is neither `other` nor a positive int.

    Args:
        meaning: the meaning of `other`, for the message.
    """
    if value != other and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} must be {other!r}{meaning} or a positive int, got {value!r}")


def check_seconds(name: str, value: object, *, zero: bool) -> None:
    """Refuse a value that is not a number of seconds; infinity is allowed, and 0 only if `zero` is True."""
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
    """Return `value` as a float, or refuse it if it is not a finite number in the given range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be a number, got {value!r}")
    if not abs(value) <= sys.float_info.max:  # of ints too: float() raises OverflowError for large ones
        raise ValueError(f"{what} must be a finite number, got {value!r}")
    bounds = [
        ("above", above, above is None or value > above),
        ("at least", least, least is None or value >= least),
        ("below", below, below is None or value < below),
        ("at most", most, most is None or value <= most),
    ]
    if not all(holds for _, _, holds in bounds):
        wanted = " and ".join(f"{word} {bound:g}" for word, bound, _ in bounds if bound is not None)
        raise ValueError(f"{what} must be {wanted}, got {value!r}")
    return float(value)


def length_of(loader: Iterable[Any] | None) -> int | None:
    """Return the number of batches of one pass, or None if the loader has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # Lightning's CombinedLoader has a length only once it is iterated
        return None
