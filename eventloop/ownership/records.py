"""Read and write the hidden files `.owner-…` in which a run says that it owns the directory.

The name of a file holds the identity of its process and a number, so it is never used again. Its owner writes
it in place, sets its time every few seconds, and removes it at the end. A file that a killed run has left is
removed by the next owner.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from secrets import token_hex
from typing import Literal

import msgspec

from eventloop.temporary.process_identity import Process, this_process

State = Literal["claiming", "training", "evaluating", "pruning", "replaying", "ending"]
"""What an owner does in its directory; one that is claiming it may not become the owner."""
SIZE = 4096
"""The size of a file in bytes: it is written in place, by one call, whatever it says."""
_PREFIX = ".owner-"
_numbers = itertools.count(1)


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
