"""Check arguments of hooks, writers and the trainer, with the same errors everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any


def check_bools(**options: object) -> None:
    """Refuse values other than True and False: "no" or "false" in a config would count as True.

    Raises:
        TypeError: naming the option and its value.
    """
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def check_optional_bools(**options: object) -> None:
    """Refuse values other than True, False and None.

    Raises:
        TypeError: naming the option and its value.
    """
    for name, value in options.items():
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"{name} must be True, False or None, got {value!r}")


def check_choice(name: str, value: object, words: Sequence[str]) -> None:
    """Refuse a value that is not one of the words.

    Raises:
        ValueError: naming the option, the words and the value.
    """
    if value not in words:
        raise ValueError(f"{name} must be {' or '.join(map(repr, words))}, got {value!r}")


def check_metric(name: str, value: object) -> None:
    """Refuse a value that cannot be the name of a metric.

    Raises:
        TypeError: naming the option and its value.
    """
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name} must be the name of a metric, got {value!r}")


def strings(name: str, value: object, *, repeated: bool = False) -> list[str]:
    """Return an option that is a string, or a list of strings, as a list; None gives an empty list.

    Args:
        repeated: whether a string may be in the list twice.

    Raises:
        TypeError, ValueError: naming the option and its value.
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
    """Refuse a value that is not a path.

    Raises:
        TypeError: naming the option and its value.
    """
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{name} must be a path, a str or a Path, got {value!r}")


def positive(what: str, value: object) -> None:
    """Refuse a value that is not a positive int.

    Raises:
        TypeError, ValueError: naming `what` and the value.
    """
    at_least(what, value, 1)


def at_least(what: str, value: object, least: int) -> None:
    """Check that a value is an int of at least `least`.

    Raises:
        TypeError, ValueError: naming `what` and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{what} must be at least {least}, got {value}")


def length_of(loader: Iterable[Any] | None) -> int | None:
    """Return the number of batches of one pass, or None if the loader has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None
