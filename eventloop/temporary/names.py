"""Name temporary files and directories after the process that writes them, and find that process again.

Files that get their final name once they are whole have such a name before. It distinguishes the files of a
killed process from those of a running one. The saver's process imports this module, so it imports only the
standard library.
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
_numbers = itertools.count(1)


class NamedProcess(NamedTuple):
    """The process that a temporary name names.

    Attributes:
        pid: the process id.
        process: the identity; None in names of earlier versions, which have the process id alone.
    """

    pid: int
    process: Process | None

    @property
    def lives(self) -> bool | None:
        """Whether the process lives; None if that cannot be known here."""
        if self.process is not None:
            return lives(self.process)
        # In a container every run may have the same id, and this version gives longer names.
        return None if self.pid != os.getpid() and has_number(self.pid) else False


def temporary_path(path: Path, why: str) -> Path:
    """Return an unused hidden name in the folder of `path`, which names this process.

    Args:
        path: the final path of the checkpoint or file.
        why: the suffix: "tmp" for new files and directories, "old" for those that are being removed.
    """
    place, pid, start = this_process()
    names = (path.with_name(f".{path.name}.{pid}-{place}-{start}-{number}.{why}") for number in _numbers)
    return next(name for name in names if not os.path.lexists(name))


def name_of_ranks(name: str, token: str, number: int) -> str:
    """Return a hidden name for a directory that the processes of several ranks write to.

    It names no process, so that the last write decides whether one lives.

    Args:
        name: the final name of the checkpoint.
        token: 12 hexadecimal digits that no other run has.
        number: the number of the save in the run.
    """
    return f".{name}.0-{token}-0-{number}.tmp"


def is_earlier_of_ranks(path: Path, than: Path) -> bool:
    """Return whether a path is the directory of an earlier save of the run that writes to `than`.

    Args:
        path: any path.
        than: a path that `name_of_ranks` has named.
    """
    one, other = _NAME.match(path.name), _NAME.match(than.name)
    if (
        one is None
        or other is None
        or one.group("pid", "place", "start") != other.group("pid", "place", "start")
    ):
        return False
    return int(one["number"]) < int(other["number"])


def process_of(path: Path) -> NamedProcess | None:
    """Return the process in a name that `temporary_path` made; None for any other name."""
    match = _NAME.match(path.name)
    if match is None:
        return None
    pid = int(match["pid"])
    if match["place"] is None:
        return NamedProcess(pid, None)
    return NamedProcess(pid, Process(match["place"], pid, int(match["start"])))


def directory_time(directory: Path) -> float:
    """Return the present time by the clock that gives the files of a directory their times, as a Unix time.

    On a shared file system that is the server's clock. In a directory that cannot be written it is the local
    one.
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
