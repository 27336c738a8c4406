"""Identify a process by more than its id, which a process in another container or machine may have as well.

Owners of directories and names of temporary files use it. A process id is valid within one boot of one
machine and one namespace of process ids, as a container has; this module calls them the place of the process.
The process that writes checkpoints imports this module, so it imports only the standard library.
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
_ENDED = "ZX"
"""The states in /proc of a process that has ended: "Z" until its parent has read the exit code, then "X"."""


class Process(NamedTuple):
    """The identity of a process.

    Attributes:
        place: a hash of the boot and the namespace in which the id is valid, as 12 hexadecimal digits.
        pid: the process id.
        start: the time at which the process started, in clock ticks since the boot; 0 if it is unknown.
    """

    place: str
    pid: int
    start: int


def this_process() -> Process:
    """Return the identity of this process; a forked child has its own."""
    return _identity(os.getpid())


@functools.cache
def _identity(pid: int) -> Process:
    """Return the identity of this process, whose id is `pid`; the cache is keyed by it because of forks."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        place = f"{boot} {os.readlink(PROC / 'self/ns/pid')}"
        start = _stat(pid)[1]
    except (OSError, ValueError, IndexError):
        from uuid import getnode  # the address of a network card, because machines may share a name

        place, start = f"{socket.gethostname()} {getnode():x}", 0
    return Process(hashlib.sha256(place.encode()).hexdigest()[:12], pid, start)


def lives(process: Process) -> bool | None:
    """Return whether a process lives; None if this machine cannot find out.

    A process that has ended does not live, even if its parent has not read its exit code yet.
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
    if state in _ENDED:
        return False
    return start == process.start if process.start else None


def has_number(pid: int) -> bool:
    """Return whether a process of this machine has this id, and has not ended."""
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
    """Return the state of a process, a letter, and the time of its start in clock ticks since the boot."""
    # the second field, the program's name in parentheses, may itself contain blanks and parentheses
    fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])
