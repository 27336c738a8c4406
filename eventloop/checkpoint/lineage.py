"""Record which checkpoints of a directory are on the run's lineage, and which are abandoned.

A run that resumes from a checkpoint other than the newest starts a new lineage there, and so does a new run
in a directory with checkpoints. `line.json` records that at once, before the run saves for the first time. It
has one entry (`StepBack`) for each time, and is replaced as a whole, durably. Without this file, all
checkpoints are on the lineage.
`directory` uses this module. It imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from eventloop.checkpoint.commit import sealed
from eventloop.checkpoint.disk import DISK, Disk, write_file
from eventloop.checkpoint.manifest import UNREADABLE, unseal
from eventloop.util.errors import CheckpointError

LINE = "line.json"
SCHEMA = 1
NOTHING = -1
"""A number below all sequence numbers."""


class StepBack(msgspec.Struct, frozen=True):
    """A record that a run resumed from a checkpoint other than the newest, or that a new run began.

    Checkpoints newer than `back_to` are abandoned; when a new run begins, all are.

    If the hooks of a run save in several directories, each directory gets the record, which may name
    checkpoints of another directory.

    Attributes:
        back_to: the sequence number of the checkpoint that the run resumed from; `NOTHING` for a new run.
        newest: the largest sequence number at that time.
    """

    back_to: int
    newest: int


class _Line(msgspec.Struct, frozen=True):
    schema: int = SCHEMA
    turns: tuple[StepBack, ...] = ()


def read_steps_back(directory: Path) -> tuple[StepBack, ...]:
    """Return the `StepBack` records of a directory, oldest first; () without any."""
    path = directory / LINE
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    body = unseal(raw, path, "line", SCHEMA)
    try:
        return msgspec.json.decode(body, type=_Line).turns
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def write_steps_back(directory: Path, turns: Sequence[StepBack], work: Path, disk: Disk = DISK) -> None:
    """Replace the record of a directory durably and atomically.

    Args:
        work: an unused name in the directory, for the temporary file.

    Raises:
        OSError: the disk is full, the directory cannot be written, or another error of the file system.
    """
    raw = sealed("line", msgspec.json.encode(_Line(turns=tuple(turns))))
    try:
        write_file(work, lambda sink: sink.write(raw), disk=disk)
        disk.rename(work, directory / LINE)
        disk.sync_directory(directory)
    except BaseException:
        with suppress(OSError):
            disk.remove(work)
        raise


def same_run_filter(turns: Sequence[StepBack]) -> Callable[[int], bool]:
    """Return a function that decides from a sequence number whether a checkpoint is of the newest run.

    A run that went back is the same run; a new one begins where a record has `NOTHING` to go back to.
    """
    ends: list[tuple[int, int]] = []  # the last sequence number of each part of the directory, and its run
    run = runs = 0

    def run_of(sequence: int) -> int:
        return next((number for last, number in ends if sequence <= last), run)

    for turn in turns:
        ends.append((turn.newest, run))
        if turn.back_to == NOTHING:
            runs += 1
        run = runs if turn.back_to == NOTHING else run_of(turn.back_to)
    return lambda sequence: run_of(sequence) == run


def lineage_filter(turns: Sequence[StepBack]) -> Callable[[int], bool]:
    """Return a function that decides from a sequence number whether a checkpoint is on the current lineage.

    On it are the checkpoints saved since the last step back, then those that led to the checkpoint which this
    step went back to, and so on. A later run may go back to a checkpoint that an earlier run had abandoned.
    """
    spans: list[tuple[float, float]] = []
    last = math.inf
    for turn in reversed(turns):
        if turn.newest < last:
            spans.append((turn.newest, last))
            last = turn.back_to
    spans.append((-math.inf, last))
    return lambda sequence: any(after < sequence <= upto for after, upto in spans)
