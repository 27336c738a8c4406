"""Identify a process by more than its number, which another process, container or machine may have as well.

Owners of directories and names of temporary files use it. A process id is looked up only in the place that
gave it: the same boot of the same machine, and the same namespace of process ids. The saver's process imports
this module, so it imports only the standard library.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
"""The directory in which Linux describes processes; macOS has none."""
_ENDED = "ZX"  # states of a process that has ended: nobody has asked for its exit code yet, or just has


class Process(NamedTuple):
    """The identity of a process.

    Attributes:
        place: a hash of the boot and the namespace that its id is valid in, as 12 hexadecimal digits.
        pid: the process id.
        start: when the process started, in ticks since the boot; 0 if the system does not say.
    """

    place: str
    pid: int
    start: int


def this_process() -> Process:
    """Return the identity of this process; a forked child has its own."""
    return _identity(os.getpid())


@functools.cache
def _identity(pid: int) -> Process:
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        place = f"{boot} {os.readlink(PROC / 'self/ns/pid')}"
        start = _stat(pid)[1]
    except (OSError, ValueError, IndexError):
        from uuid import getnode  # the address of a network card; machines may share a name

        place, start = f"{socket.gethostname()} {getnode():x}", 0
    return Process(hashlib.sha256(place.encode()).hexdigest()[:12], pid, start)


def lives(process: Process) -> bool | None:
    """Return whether a process lives; None if that cannot be known here.

    A process that has ended, and whose parent has not asked for its exit code yet, does not live.
    """
    here = this_process()
    if process == here:
        return True
    if process.place != here.place:
        return None
    try:
        state, start = _stat(process.pid)
    except (OSError, ValueError, IndexError):
        return None if has_number(process.pid) else False
    if state in _ENDED or (process.start and start != process.start):
        return False
    return True if process.start else None


def has_number(pid: int) -> bool:
    """Return whether some process here has this id, and has not ended."""
    try:
        if _stat(pid)[0] in _ENDED:
            return False
    except (OSError, ValueError, IndexError):
        pass  # no /proc, or it hides processes of other users
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _stat(pid: int) -> tuple[str, int]:
    """Return the state of a process, and when it started, in ticks since the boot."""
    # the second field is the program's name, which may hold blanks and parentheses
    fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])
