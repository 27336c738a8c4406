"""Read and write `heartbeat.json`, in which a run says each second how far it is.

`training.heartbeat` collects the status of a trainer, and `eventloop.watching` shows it. The run overwrites
the file in place, by one call: to replace it by a rename each second would burden a network disk. This module
imports no torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import sleep
from typing import Literal, NamedTuple

import msgspec

from eventloop.util.surrogates import escaped

FILE = "heartbeat.json"
SIZE = 8192
"""The size of the file in bytes. It is constant, so that one call overwrites the file."""
VERSION = 1
"""The version of the file. A reader ignores a file of a later version."""
ERROR_BYTES = 2048
"""The largest number of bytes of an error or a reason in the file."""
DIRECTORIES = 8
"""The largest number of directories of checkpoints in the file."""
_TRIES, _TRY_SECONDS = 10, 0.02  # how often a file that is being written is read, and the pause

RunState = Literal["training", "validating", "testing", "predicting", "paused", "ending", "ended"]
"""What a run does. It is "ending" from a signal, or the end of the training, until everything is written."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `heartbeat.json`. Times are Unix times in seconds by the clock of the run's machine."""

    version: int = VERSION
    host: str
    """The name of the machine."""
    pid: int
    place: str
    """A hash of the boot and the namespace in which the process id is valid."""
    start: int
    """When the process started, in ticks since the boot; 0 if it is unknown."""
    begun: float
    """When the run began."""
    time: float
    """When this status was written."""
    state: RunState
    iter: int
    """Completed training iterations."""
    first_iter: int
    """Completed training iterations when the run began; above 0 after a resume."""
    epoch: int
    """Completed epochs."""
    max_iters: int | None
    max_epochs: int | None
    speed: float | None
    """Training iterations a second over the last seconds, without evaluations; None before the second one."""
    moved: float
    """When `iter` or `state` last changed."""
    ranks: int
    """The number of processes that train together."""
    checkpoints: list[str] = []
    """The directories of the checkpoints; the path of one in the run's directory is relative to that."""
    reason: str | None = None
    """Why the run has ended: "completed", "error", or the reason of a stop; None before."""
    error: str | None = None
    """The error that ended the run."""
    signal: str | None = None
    """The name of the signal that ended the run, such as "SIGTERM"."""


class Outcome(NamedTuple):
    """How a run ended: the fields of its `after_run` event."""

    reason: str
    error: str | None = None
    signal: str | None = None


class Beat(NamedTuple):
    """A status that was read, with the time at which it was written.

    Attributes:
        status: the status; None if the file is torn, damaged, or of a later version.
        modified: the time of the file in nanoseconds, by the clock of the directory. It differs for each
            write.
    """

    status: RunStatus | None
    modified: int


def write_status(directory: Path, status: RunStatus) -> None:
    """Write the status of a run into its directory, which is not created.

    Raises:
        OSError: the file cannot be written.
    """
    flags = os.O_CREAT | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(directory / FILE, flags, 0o666)
    try:
        os.write(descriptor, _encode(status))
    finally:
        os.close(descriptor)


def read_status(directory: Path) -> Beat | None:
    """Read the status of a run; None if its directory has no `heartbeat.json`.

    A file that is being written is read again for a fifth of a second.

    Raises:
        OSError: the file cannot be read.
    """
    for tries_left in range(_TRIES, -1, -1):
        try:
            # opened, because on a network disk `stat` of a path may return an old time from a cache
            with open(directory / FILE, "rb", buffering=0) as file:
                raw, modified = file.read(SIZE), os.fstat(file.fileno()).st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return None
        if (status := _decode(raw)) is not None or not tries_left:
            return Beat(status, modified)
        sleep(_TRY_SECONDS)
    return None


def _encode(status: RunStatus) -> bytes:
    """Return a status as JSON of `SIZE` bytes, with texts and lists shortened so that they fit."""
    short = msgspec.structs.replace(
        status,
        host=_shortened(status.host, 256),
        checkpoints=[_shortened(path, 256) for path in status.checkpoints[:DIRECTORIES]],
        **{name: _shortened(getattr(status, name)) for name in ("reason", "error")},
    )
    return msgspec.json.encode(short).ljust(SIZE - 1)[: SIZE - 1] + b"\n"


def _shortened(text: str | None, most: int = ERROR_BYTES) -> str | None:
    """Shorten a text at its end, so that JSON needs at most `most` bytes for it."""
    if text is None:
        return None
    text = escaped(text)
    while len(msgspec.json.encode(text)) > most:
        text = f"{text[: len(text) * 3 // 4]}…"
    return text


def _decode(raw: bytes) -> RunStatus | None:
    """Return the status in a file; None if it is torn, damaged, or of a later version."""
    try:
        status = msgspec.json.decode(raw, type=RunStatus)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return status if status.version <= VERSION else None
