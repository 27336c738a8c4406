"""Keep the processors of this machine busy, as another job does, and time the exit of programs in company."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

_BUSY = """
import os, sys
parent = int(sys.argv[1])
print("busy", flush=True)
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


def processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def busy_machine(processes_per_cpu: int) -> Iterator[None]:
    """Run `processes_per_cpu` busy processes for each processor within the block, at normal priority.

        with busy_machine(2):
            trainer.train()

    They all run when the block begins and have ended when it is left. They also end if this process is killed. They
    belong to this process's session, so Linux's autogroups do not part them from what is tested.
    """
    with ExitStack() as stack:
        started = []
        for _ in range(processes_per_cpu * processors()):
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BUSY, str(os.getpid())], stdout=subprocess.PIPE
            )
            stack.enter_context(process)  # waits for it, and closes the pipe
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"busy\n"
        yield


GRACE = 5.0
"""Seconds from a signal within which a program is gone, whatever hangs: schedulers kill it soon after."""
ATTEMPTS = 3


def check_grace(exits: Callable[[int], float], alone: Callable[[int], float]) -> None:
    """Check that a program in which something hangs is gone within the grace.

    The machine may be loaded by others. So one of three attempts is enough, and where the program takes long even if
    nothing hangs, it has five times as long.

    Args:
        exits: returns the seconds from the signal to the exit; called with the number of the attempt.
        alone: the same of the program in which nothing hangs.
    """
    took = []
    for attempt in range(ATTEMPTS):
        took.append((exits(attempt), alone(attempt)))
        if took[-1][0] < max(GRACE, 5 * took[-1][1]):
            return
    raise AssertionError(
        f"expected an exit within {GRACE:g} s of the signal, took (with and without hangs): {took}"
    )
