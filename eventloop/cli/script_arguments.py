"""Separate the arguments of a command of eventloop from those of the script that it runs."""

from __future__ import annotations

from collections.abc import Sequence

from eventloop.cli.tell import options_first

_WITH_VALUE = ("--writers", "--work-dir")
"""The options of `run` that take a value."""


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command's own arguments, and the arguments of the script.

    For `plan`, the script's arguments follow the first `--`; for `run`, they follow the script. argparse
    cannot separate them: it would drop a second `--`, and take options of the script for the command's.
    """
    given = list(arguments)
    if given[:1] == ["run"]:
        end = _script_index(given) + 1
        return given[:end], given[end:]
    if given[:1] == ["tell"]:
        return ["tell", *options_first(given[1:])], []
    if given[:1] != ["plan"] or "--" not in given:
        return given, []
    separator = given.index("--")
    return given[:separator], given[separator + 1 :]


def _script_index(given: Sequence[str]) -> int:
    """Return the index of the script in the arguments of `run`."""
    index = 1
    while index < len(given) and given[index].startswith("-"):
        if given[index] == "--":
            return index + 1
        index += 2 if given[index] in _WITH_VALUE else 1
    return index
