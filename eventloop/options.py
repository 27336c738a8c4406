"""Checks of the options of hooks and writers that are alike everywhere."""

from __future__ import annotations

from os import PathLike


def check_bools(**options: object) -> None:
    """Refuse what is neither True nor False: a "no" or "false", as a config may say, would count as True.

    Raises:
        TypeError: naming the option and its value.
    """
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def check_optional_bools(**options: object) -> None:
    """Refuse what is neither True nor False nor None.

    Raises:
        TypeError: naming the option and its value.
    """
    for name, value in options.items():
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"{name} must be True, False or None, got {value!r}")


def check_path(name: str, value: object) -> None:
    """Refuse what is no path.

    Raises:
        TypeError: naming the option and its value.
    """
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{name} must be a path, a str or a Path, got {value!r}")
