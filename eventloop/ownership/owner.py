"""Read and write the records of a directory's owners, and decide whether an owner is alive.

A record is a hidden file `.owner-…` in the directory, and names the run that owns it. The name of the file
has the identity of the run's process and a number, so it is never used again. The owner writes the file in
place, sets its time every few seconds, and removes it at the end. A file that a killed run has left is
removed by the next owner.

A process of this machine is looked up by its id. A run on another machine counts as alive as long as it sets
the time of its file. This time is compared with the clock of the directory's file system, never with the
clock of a machine.
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
"""What a run does in a directory. A run is "claiming" until it is the owner, or has found another owner."""
SIZE = 4096
"""The size of the file of a record in bytes. It is constant, so that one call overwrites the file."""
_PREFIX = ".owner-"
_numbers = itertools.count(1)
SILENT_SECONDS = 30.0
"""Seconds after which a run on another machine that has not set its file's time counts as dead."""
_TRIES, _TRY_SECONDS = 10, 0.02  # how often a file that another process is writing is read, and the pause

held: set[str] = set()
"""The names of the files of all records that belong to runs of this process."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The run that owns a directory, or that was killed in it.

    Attributes:
        directory: the directory.
        host: the name of the owner's machine; "" if its record is damaged.
        pid: the process id on that machine; 0 if the record is damaged.
        since: the time at which it became the owner, as in ISO 8601.
        state: "claiming" for a moment, then "training", "evaluating", "pruning" or "replaying"; "ending" from
            a signal, or the end of the training, until everything is written.
        lives: whether its process is alive; None if it is on another machine, and was alive less than half a
            minute ago.
        touched: the time of the file of its record, which the owner sets every few seconds: nanoseconds since
            the epoch, by the clock of the directory.
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
    owners = owners_in(Path(directory))
    return max(owners, key=_rank) if owners else None


def owners_in(directory: Path) -> list[Owner]:
    """Return all runs with a record in a directory.

    These are its owner, runs that are about to become the owner, and runs that were killed there.

    Raises:
        OSError: the directory, or a record in it, cannot be read.
    """
    owners = (_read(directory, path) for path in records_in(directory))
    return [owner for owner in owners if owner is not None]


def _rank(owner: Owner) -> tuple[int, bool, int]:
    """Return a key that is greatest for the owner among the runs with a record in a directory.

    A living run comes before one that may be alive, then a run that is the owner before one that claims it,
    then the run whose record is the newest.
    """
    life = {True: 2, None: 1, False: 0}[owner.lives]
    return life, owner.state != "claiming", owner.touched


def _read(directory: Path, path: Path) -> Owner | None:
    """Return the run with the record at a path; None if the file is gone."""
    for tries_left in range(_TRIES, -1, -1):
        try:
            record, touched = read_record(path)
        except FileNotFoundError:  # the run has ended, and has removed its record
            return None
        if record is not None:
            return _owner(directory, path, record, touched)
        if tries_left:
            sleep(_TRY_SECONDS)
    # damaged: the run was killed, or the machine crashed, while the record was written
    return Owner(
        directory=directory,
        host="",
        pid=0,
        since="",
        state="training",
        lives=_may_live(directory, touched),
        touched=touched,
        path=path,
    )


def _owner(directory: Path, path: Path, record: Record, touched: int) -> Owner:
    """Return the run with a record, and decide whether it is alive."""
    ours = record.process == this_process()
    if _is_copied(path, record):
        life: bool | None = False
    elif ours:
        life = path.name in held
    elif (life := lives(record.process)) is None:
        life = _may_live(directory, touched)
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


def _may_live(directory: Path, touched: int) -> bool | None:
    """Return False if a run has not set its file's time for too long, else None: it may have died since.

    A time in the future comes from another clock, so it does not show that the run is alive either.
    """
    return False if abs(directory_time(directory) - touched / 1e9) > SILENT_SECONDS else None


def _is_copied(path: Path, record: Record) -> bool:
    """Return whether a record is a copy, made with its directory, whose run owns the original directory.

    False for a run on another machine, whose paths say nothing here. There the time of the file decides,
    which no run sets in a copy.
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
        host: the name of the owner's machine.
        pid, place, start: the identity of the owner's process: its id, a hash of the boot and the namespace
            in which the id is valid, and the time of its start.
        since: the time at which it became the owner, as in ISO 8601.
        state: what the owner does in the directory.
        directory: the absolute path of the directory when the owner acquired it; bytes, because a path need
            not be UTF-8.
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
    """Return the path for the file of a new record of this process."""
    place, pid, start = this_process()
    # a random end, because without /proc a later process may have the same identity
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
    """Return the record at a path, or None if it is damaged, and the time of its file in nanoseconds.

    Raises:
        OSError: the file cannot be read.
    """
    # opened, because on a network disk `stat` of a path may return an old time from a cache
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
    """Overwrite a record in place, so that its file never disappears from the directory.

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
