"""Read the CPU time of a process or thread, as a sign that it makes progress.

A timeout for a process or thread is extended while that uses the CPU: on a busy machine it is slow, but not
stuck. A process that waits for a lock, a disk or a server, or is stopped, uses almost no CPU time. The
figures come from Linux's CPU clocks, which count nanoseconds. (/proc counts in steps of 10 ms: a single step
would count as progress in a wait of less than a second.) On other systems the figures are 0, so that timeouts
are not extended.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from time import clock_gettime

_PROCESS_CLOCK, _THREAD_CLOCK = 2, 6
"""The kinds of Linux's CPU clocks. A clock has the number `~id << 3 | kind`, with a process or thread id."""
LEAST_SHARE = 0.01
"""The least share of one CPU's time that counts as progress.

A worker that hangs uses less: one thread in it wakes once a second, for some 0.1 ms.
"""


def of_process(pid: int) -> float:
    """Return the CPU time in seconds of a process with all its threads; 0.0 if it is unknown."""
    return _read(pid, _PROCESS_CLOCK)


def of_thread(native_id: int) -> float:
    """Return the CPU time in seconds of a thread of this process; 0.0 if it is unknown."""
    return _read(native_id, _THREAD_CLOCK)


def computes(before: float, now: float, seconds: float) -> bool:
    """Return whether the CPU time has grown enough in the last `seconds` to count as progress.

    If it has shrunk, another process has taken the place of the first, and all of its time counts.

    Args:
        before, now: the CPU times in seconds, `seconds` ago and now.
    """
    used = now - before if now >= before else now
    return used > LEAST_SHARE * seconds


def _read(task: int, kind: int) -> float:
    """Return the seconds of a CPU clock, by the id of its process or thread; 0.0 if it cannot be read."""
    if sys.platform == "linux":  # elsewhere these numbers may belong to other clocks
        with suppress(OSError, OverflowError):  # there is no such process or thread
            return clock_gettime(~task << 3 | kind)
    return 0.0
