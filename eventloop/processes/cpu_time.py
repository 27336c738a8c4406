"""Read how much a process or thread has computed, as a sign that it makes progress.

A wait that has lasted for its limit goes on while its counterpart computes: on a busy machine it is slow, not
stuck. What waits for a lock, a disk or a server, or is stopped, computes next to nothing. The figures come
from Linux's /proc; elsewhere they are 0, so that each limit is one of time.
"""

from __future__ import annotations

import os
from contextlib import suppress

LEAST_SHARE = 0.01
"""The share of a processor that progress takes.

A worker that hangs uses less: its watching thread wakes once a second, for some 0.1 ms.
"""


def of_process(pid: int) -> float:
    """Return the CPU time in seconds of a process with all its threads; 0.0 if it is unknown."""
    return _read(f"/proc/{pid}/stat")


def of_thread(native_id: int) -> float:
    """Return the CPU time in seconds of a thread of this process; 0.0 if it is unknown."""
    return _read(f"/proc/self/task/{native_id}/stat")


def computes(before: float, now: float, seconds: float) -> bool:
    """Return whether a process or thread got on in the last `seconds`, from its CPU times before and now.

    If the CPU time has shrunk, another process has taken its place, and counts with all of its own.
    """
    used = now - before if now >= before else now
    return used > LEAST_SHARE * seconds


def _read(path: str) -> float:
    with suppress(OSError, ValueError, IndexError), open(path, "rb") as file:
        # the name of the program comes before, in brackets, and may hold anything
        fields = file.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
