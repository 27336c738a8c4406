"""Read and write the records of owners of a directory, and decide whether an owner lives.

The hidden files `.owner-…` in a directory say which run owns it. The name of a file holds the identity of its
process and a number, so it is never used again. Its owner writes it in place, sets its time every few
seconds, and removes it at the end. A file that a killed run has left is removed by the next owner.

A process of this machine is looked up. A run elsewhere lives as long as it sets the time of its file, which
is compared with the clock of the directory, never with the clock of a machine.
"""

from __future__ import annotations

import itertools
import os
from os import PathLike
from pathlib import Path
from secrets import token_hex
from time import sleep
from typing import Literal

import msgspec

from eventloop.temporary.names import directory_time
from eventloop.temporary.process_identity import Process, lives, this_process

State = Literal["claiming", "training", "evaluating", "pruning", "replaying", "ending"]
"""What an owner does in its directory; one that is claiming it may not become the owner."""
SIZE = 4096
"""The size of a file in bytes: it is written in place, by one call, whatever it says."""
_PREFIX = ".owner-"
_numbers = itertools.count(1)
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


# --- records -----------------------------------------------------------------------------------------------


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of an owner's file.

    Attributes:
        host: the name of its machine.
        pid, place, start: the identity of its process.
        since: when it took the directory, ISO 8601.
        state: what it does there.
        directory: the absolute path at which it took the directory; a path need not be UTF-8.
    """

    host: str
    pid: int
    place: str
    start: int
    since: str
    state: State
    directory: bytes

    @property
    def process(self) -> Process:
        """The identity of the owner's process."""
        return Process(self.place, self.pid, self.start)


def new_path(directory: Path) -> Path:
    """Return the path of a new file of this process."""
    place, pid, start = this_process()
    # random, because without /proc a later process may have the same identity
    return directory / f"{_PREFIX}{pid}-{place}-{start}-{next(_numbers)}-{token_hex(4)}"


def records_in(directory: Path) -> list[Path]:
    """Return the paths of all owners' files in a directory, which need not exist.

    Raises:
        OSError: the directory cannot be read.
    """
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [directory / name for name in sorted(names) if name.startswith(_PREFIX)]


def read_record(path: Path) -> tuple[Record | None, int]:
    """Return a record, None if it is damaged, and the time of its file in nanoseconds.

    Raises:
        OSError: the file cannot be read.
    """
    # an open file has the server's present times, where `stat` may return those that were cached
    with open(path, "rb") as file:
        raw, touched = file.read(), os.fstat(file.fileno()).st_mtime_ns
    try:
        return msgspec.json.decode(raw, type=Record), touched
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None, touched


def create_record(path: Path, record: Record) -> None:
    """Create the file of a record.

    Raises:
        OSError: the directory cannot be written, or the disk is full.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        os.write(descriptor, _encode(record))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def write_record(path: Path, record: Record) -> None:
    """Write another record into a file, whose name stays in the directory all the time.

    Raises:
        FileNotFoundError: another owner has removed the file.
        OSError: the file cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        os.write(descriptor, _encode(record))
    finally:
        os.close(descriptor)


def _encode(record: Record) -> bytes:
    return msgspec.json.encode(record).ljust(SIZE - 1) + b"\n"
