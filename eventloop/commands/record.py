"""Write applied commands to `RUN/commands.jsonl`, and read this file to apply them again.

The file is replaced as a whole, which is possible because commands are few, so it is never torn. It has the
applied commands in their order, and after a resume also the commands that are still to be applied again.
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
    """Replace the record, and sync it to the disk.

    Raises:
        OSError: the disk is full, or the file cannot be written; then the old record stays.
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
    """Return the iterations of the checkpoints whose metrics an evaluator has reported to a run.

    Args:
        commands: the applied commands of the run.
    """
    reports = [command.arguments for command in commands if command.command == EVALUATED]
    return {arguments["iter"] for arguments in reports if "iter" in arguments}


def set_aside(path: Path) -> Path | None:
    """Rename the record of an earlier run to a free name, and return the new path; None without a record.

    Raises:
        OSError: the file cannot be renamed.
    """
    if not path.exists():
        return None
    number = 1
    while (free_path := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    os.rename(path, free_path)
    return free_path


def _decode(path: Path, number: int, line: bytes) -> Applied:
    """Decode a line of a record; an error has the path and the line's number."""
    try:
        return msgspec.json.decode(line, type=Applied)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}, line {number}: expected an applied command as in a run's {NAME}, got {line[:80]!r}: "
            f"{error}"
        ) from None
