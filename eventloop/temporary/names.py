"""Name temporary files and directories after the process that writes them, and read the process from a name.

A file has a temporary name until it is complete, and is then renamed. The name shows whether the process that
writes the file was killed or is still running. The process that writes checkpoints imports this module, so it
imports only the standard library.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from eventloop.temporary.process_identity import Process, has_number, lives, this_process

_NAME = re.compile(
    r"^\..+\.(?P<pid>\d{1,19})(-(?P<place>[0-9a-f]{12})-(?P<start>\d{1,20}))?-(?P<number>\d+)\.(tmp|old)$"
)
"""Matches `.<final name>.<pid>-<place>-<start>-<number>.tmp`, or ".old"; `Process` describes place and start.

Earlier versions wrote names without place and start.
"""
_numbers = itertools.count(1)  # in the names of this process, so that they differ


class NamedProcess(NamedTuple):
    """The process that a temporary name contains.

    Attributes:
        pid: the process id.
        process: the identity of the process; None if an earlier version, which wrote only the id, gave the
            name.
    """

    pid: int
    process: Process | None

    @property
    def lives(self) -> bool | None:
        """Whether the process lives; None if this machine cannot find out."""
        if self.process is not None:
            return lives(self.process)
        # The name is of an earlier version. If it has the id of this process, which writes longer names, then
        # another process gave the name that had the same id, in an earlier container, and has ended.
        return None if self.pid != os.getpid() and has_number(self.pid) else False


def temporary_path(path: Path, why: str) -> Path:
    """Return an unused hidden path in the folder of `path`, with this process in its name.

    Args:
        path: the final path of the checkpoint or file.
        why: the suffix: "tmp" for a path that is being written, "old" for a path that is being removed.
    """
    place, pid, start = this_process()
    names = (path.with_name(f".{path.name}.{pid}-{place}-{start}-{number}.{why}") for number in _numbers)
    return next(name for name in names if not os.path.lexists(name))


def name_of_ranks(name: str, token: str, number: int) -> str:
    """Return a hidden name for a directory that the processes of several ranks write to.

    In the parts of the name that identify a process it has the token, as the place, and zeros. No machine
    finds such a process, so the time of the last write decides whether the ranks still write.

    Args:
        name: the final name of the checkpoint.
        token: 12 hexadecimal digits that no other run has.
        number: the number of the save in the run.
    """
    return f".{name}.0-{token}-0-{number}.tmp"


def is_earlier_of_ranks(path: Path, than: Path) -> bool:
    """Return whether the run that writes to `than` has written to `path` in an earlier save.

    Args:
        path: any path.
        than: a path with a name that `name_of_ranks` returned.
    """
    earlier, later = _NAME.match(path.name), _NAME.match(than.name)
    if earlier is None or later is None:
        return False
    same_run = earlier.group("pid", "place", "start") == later.group("pid", "place", "start")
    return same_run and int(earlier["number"]) < int(later["number"])


def process_of(path: Path) -> NamedProcess | None:
    """Return the process in a temporary path's name; None if the name does not have the form of `_NAME`.

    A name by `name_of_ranks` gives a process that no machine finds, because it is made of a token.
    """
    match = _NAME.match(path.name)
    if match is None:
        return None
    pid = int(match["pid"])
    if match["place"] is None:
        return NamedProcess(pid, None)
    return NamedProcess(pid, Process(match["place"], pid, int(match["start"])))


def directory_time(directory: Path) -> float:
    """Return the present Unix time by the clock that gives the files of a directory their times.

    On a shared file system this is the server's clock. In a directory that cannot be written, the clock of
    this machine is read instead.
    """
    probe = temporary_path(directory / "clock", "tmp")
    try:
        descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except OSError:
        return time.time()
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        with suppress(OSError):
            probe.unlink()
