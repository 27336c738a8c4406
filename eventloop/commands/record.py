"""Record applied commands in `RUN/commands.jsonl`, and read such a file for a repetition.

The file is replaced as a whole, so it is never torn: commands are few. It holds the applied commands in their
order, and after a resume also those that are still to be applied again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from eventloop.commands.messages import EVALUATED, Applied
from eventloop.util.append_file import replacing

NAME = "commands.jsonl"
"""The name of the file in a run's directory."""


def write_record(path: Path, commands: Sequence[Applied]) -> None:
    """Replace the record durably.

    Raises:
        OSError: the disk is full, or the file cannot be written; the former record stays.
    """
    with replacing(path) as file:
        file.writelines(msgspec.json.encode(command) + b"\n" for command in commands)


def read_record(path: Path) -> list[Applied]:
    """Read the commands of a record, in their order.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is no applied command; the text has the path and the number of the line.
    """
    return [_decode(path, number, line) for number, line in enumerate(path.read_bytes().splitlines(), 1)]


def iterations_evaluated(commands: Sequence[Applied]) -> set[int]:
    """Return the iterations whose checkpoints have metrics of an evaluator, by a run's applied commands."""
    return {
        each.arguments["iter"] for each in commands if each.command == EVALUATED and "iter" in each.arguments
    }


def set_aside(path: Path) -> Path | None:
    """Rename the record of an earlier run in the directory, and return its new path; None without one.

    Raises:
        OSError: it cannot be renamed.
    """
    if not path.exists():
        return None
    number = 1
    while (free := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    os.rename(path, free)
    return free


def _decode(path: Path, number: int, line: bytes) -> Applied:
    try:
        return msgspec.json.decode(line, type=Applied)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}, line {number}: expected an applied command as in a run's {NAME}, got {line[:80]!r}: "
            f"{error}"
        ) from None
