"""Which checkpoints of a directory are on the line of the run, and which a run has left behind. Imports no torch.

Whoever resumes from another checkpoint than the newest begins a new line there. Until it has saved for the first time
nothing but `line.json` says so: it lists, for each time a run went back, where to and what was the newest then. It is
replaced as a whole, durably; without it, the newest is the one saved last.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from eventloop.checkpoint.disk import DISK, Disk, write_file
from eventloop.checkpoint.manifest import UNREADABLE, open_regular
from eventloop.util.errors import CheckpointError

LINE = "line.json"
SCHEMA = 1


class Turn(msgspec.Struct, frozen=True):
    """A run went back to a checkpoint, while another was the newest: the sequences of both. Where the hooks of the run
    save in several directories, each has the turn, which may name checkpoints of another."""

    back_to: int
    newest: int


class _Line(msgspec.Struct, frozen=True):
    schema: int = SCHEMA
    turns: tuple[Turn, ...] = ()


class _Versioned(msgspec.Struct):
    """What a line of every version has."""

    schema: Any = None


class _Envelope(msgspec.Struct):
    """As a manifest's: the SHA-256 of the bytes that follow."""

    sha256: str
    line: msgspec.Raw


def read_turns(directory: Path) -> tuple[Turn, ...]:
    """The turns of a directory, oldest first; none where nobody went back.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or is of a later version.
    """
    path = directory / LINE
    try:
        with open_regular(path) as file:
            raw = file.read()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        envelope = msgspec.json.decode(raw, type=_Envelope)
        if hashlib.sha256(envelope.line).hexdigest() != envelope.sha256:
            raise CheckpointError(f"{path} is damaged: it does not have the hash it names")
        schema = msgspec.json.decode(envelope.line, type=_Versioned).schema
        if schema != SCHEMA:
            raise CheckpointError(
                f"{path} has schema {schema!r}, this version of eventloop reads {SCHEMA}: update eventloop"
            )
        return msgspec.json.decode(envelope.line, type=_Line).turns
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def write_turns(directory: Path, turns: Sequence[Turn], work: Path, disk: Disk = DISK) -> None:
    """Replace the turns of a directory, durably and at once: a crash leaves those before, or these.

    Args:
        work: a free name in the directory, for the meantime.

    Raises:
        OSError: the disk is full, the directory cannot be written, ...
    """
    body = msgspec.json.encode(_Line(turns=tuple(turns)))
    raw = msgspec.json.encode(_Envelope(hashlib.sha256(body).hexdigest(), msgspec.Raw(body)))
    try:
        write_file(work, lambda sink: sink.write(raw), disk=disk)
        disk.rename(work, directory / LINE)
        disk.sync_directory(directory)
    except BaseException:
        with suppress(OSError):
            disk.remove(work)
        raise


def line_of(turns: Sequence[Turn]) -> Callable[[int], bool]:
    """Tell whether a checkpoint, by its sequence, is on the line that was last gone on with.

    That line is what was saved since the last turn; before it, what led to where that one went back to, and so on:
    a later run may go back to what an earlier one had left behind.
    """
    spans: list[tuple[float, float]] = []
    last = math.inf
    for turn in reversed(turns):
        if turn.newest < last:
            spans.append((turn.newest, last))
            last = turn.back_to
    spans.append((-math.inf, last))
    return lambda sequence: any(after < sequence <= upto for after, upto in spans)
