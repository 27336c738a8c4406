"""Read the CPU time of a process or thread, as a sign that it makes progress.

A timeout for a process or thread is extended while that uses the CPU: on a busy machine it is slow, but not
stuck. A process that waits for a lock, a disk or a server, or is stopped, uses almost no CPU time. The
figures come from Linux's /proc. On other systems they are 0, so that timeouts are not extended.
"""

from __future__ import annotations

import os
from contextlib import suppress

LEAST_SHARE = 0.01
"""The least share of one CPU's time that counts as progress.

A worker that hangs uses less: one thread in it wakes once a second, for some 0.1 ms.
"""


def of_process(pid: int) -> float:
    """Return the CPU time in seconds of a process with all its threads; 0.0 if it is unknown."""
    return _read(f"/proc/{pid}/stat")


def of_thread(native_id: int) -> float:
    """Return the CPU time in seconds of a thread of this process; 0.0 if it is unknown."""
    return _read(f"/proc/self/task/{native_id}/stat")


def computes(before: float, now: float, seconds: float) -> bool:
    """Return whether the CPU time has grown enough in the last `seconds` to count as progress.

    If it has shrunk, another process has taken the place of the first, and all of its time counts.

    Args:
        before, now: the CPU times in seconds, `seconds` ago and now.
    """
    used = now - before if now >= before else now
    return used > LEAST_SHARE * seconds


def _read(path: str) -> float:
    """Return the sum of user and system time, in seconds, in a file `stat` of /proc; 0.0 without the file."""
    with suppress(OSError, ValueError, IndexError), open(path, "rb") as file:
        # the program's name comes first, in parentheses, and may itself contain spaces and parentheses
        fields = file.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
