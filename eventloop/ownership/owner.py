"""Find the owner of a directory, and decide whether that run lives.

A process of this machine is looked up. A run elsewhere lives as long as it sets the time of its file, which
is compared with the clock of the directory, never with the clock of a machine.
"""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path
from time import sleep

import msgspec

from eventloop.ownership.records import Record, State, read_record, records_in
from eventloop.temporary.names import directory_time
from eventloop.temporary.process_identity import lives, this_process

SILENT_SECONDS = 30.0
"""Seconds without a sign of life after which a run elsewhere counts as dead."""
_TRIES, _TRY_SECONDS = 10, 0.02  # how often to read a file that another process is writing

held: set[str] = set()
"""The names of the files of the runs in this process."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The run that owns a directory, or that was killed in it.

    Attributes:
        directory: the directory.
        host: the name of the owner's machine; "" if its record is damaged.
        pid: the process id there; 0 if the record is damaged.
        since: when it took the directory, ISO 8601.
        state: "claiming" for a moment, then "training", "evaluating", "pruning" or "replaying"; "ending" from
            a signal, or the end of the training, until everything is written.
        lives: whether it lives; None for one elsewhere that lived less than half a minute ago.
        touched: the time of its last sign of life, in nanoseconds, by the clock of the directory.
        path: the path of its record.
        ours: whether this process is the owner.
    """

    directory: Path
    host: str
    pid: int
    since: str
    state: State
    lives: bool | None
    touched: int
    path: Path
    ours: bool = False


def read_owner(directory: str | PathLike[str]) -> Owner | None:
    """Return the owner of a directory; None if it has no owner, as after the end of a run.

        owner = read_owner("runs/digits")
        if owner is not None and owner.lives:
            print(f"process {owner.pid} on {owner.host} is {owner.state} since {owner.since}")

    Raises:
        OSError: the directory, or a record in it, cannot be read.
    """
    found = owners_in(Path(directory))
    return max(found, key=_rank) if found else None


def owners_in(directory: Path) -> list[Owner]:
    """Return all runs with a record in a directory: its owner, those that claim it, and those killed there.

    Raises:
        OSError: the directory, or a record in it, cannot be read.
    """
    owners = (_read(directory, path) for path in records_in(directory))
    return [owner for owner in owners if owner is not None]


def _rank(owner: Owner) -> tuple[int, bool, int]:
    life = {True: 2, None: 1, False: 0}[owner.lives]
    return life, owner.state != "claiming", owner.touched


def _read(directory: Path, path: Path) -> Owner | None:
    for tries in range(_TRIES, -1, -1):
        try:
            record, touched = read_record(path)
        except FileNotFoundError:  # the run has ended, and has removed its record
            return None
        if record is not None:
            return _owner(directory, path, record, touched)
        if tries:
            sleep(_TRY_SECONDS)
    # the run was killed while it wrote the record, or the machine was
    return Owner(
        directory=directory,
        host="",
        pid=0,
        since="",
        state="training",
        lives=_beats(directory, touched),
        touched=touched,
        path=path,
    )


def _owner(directory: Path, path: Path, record: Record, touched: int) -> Owner:
    ours = record.process == this_process()
    if _is_copied(path, record):
        life: bool | None = False
    elif ours:
        life = path.name in held
    elif (life := lives(record.process)) is None:
        life = _beats(directory, touched)
    return Owner(
        directory=directory,
        host=record.host,
        pid=record.pid,
        since=record.since,
        state=record.state,
        lives=life,
        touched=touched,
        path=path,
        ours=ours,
    )


def _beats(directory: Path, touched: int) -> bool | None:
    """Return False if the owner has been silent for too long, else None: it may have died just now.

    A time in the future is not of this clock, so it is no sign of life either.
    """
    return False if abs(directory_time(directory) - touched / 1e9) > SILENT_SECONDS else None


def _is_copied(path: Path, record: Record) -> bool:
    """Return whether a record was copied with its directory, so that its owner has another directory.

    False for an owner on another machine. There the age of the record decides, which no run renews in a copy.
    """
    if record.place != this_process().place:
        return False
    original = Path(os.fsdecode(record.directory), path.name)
    try:
        return not os.path.samefile(original, path)
    except OSError:  # the directory was renamed
        return False
