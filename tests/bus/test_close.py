"""A close that is interrupted, or that two threads ask for: it is finished, and what is reported is true."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.bus.subscription import DrainReport
from tests.conftest import DEADLINE, Held
from tests.support.process_support import emit, until

Run = Callable[..., subprocess.CompletedProcess[str]]

INTERRUPTED = """
import os, signal, sys, threading, time
from eventloop.background import closing
from eventloop.background.queues import awaited
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter

interrupted = threading.Event()
go_on = threading.Event()

def interrupts(event):
    if event.iter == 0:
        while not bus.closed:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.wait(50)
    if event.iter == 50:
        go_on.wait(50)
    seen.append(event.iter)

seen = []
bus = Bus(drain_timeout=50)
bus.subscribe(interrupts, "after_train_iter", offload="thread", name="interrupts")
for i in range(100):
    bus.emit(AfterTrainIter(iter=i))
"""


@pytest.mark.slow
def test_close_after_a_ctrl_c_says_what_it_leaves(python: Run) -> None:
    """It keeps its own deadline, and calls complete only what is; so does the one after it."""
    program = (
        INTERRUPTED
        + """
try:
    bus.close()
except KeyboardInterrupt:
    interrupted.set()
while len(seen) < 50:
    time.sleep(0.001)
closing.monotonic = lambda: 0.0  # so that the log names the timeout, also on a busy machine
awaited.STUCK_SECONDS = 60.0  # and names no delivery that has become stuck
for report in bus.close(0.1), bus.close(0.1):
    print(report.complete, report.stats[0].delivered, report.stats[0].queued)
"""
    )

    ran = python(program)

    assert ran.returncode == 0
    assert ran.stdout.splitlines() == ["False 50 50"] * 2
    (line,) = ran.stderr.splitlines()
    assert line.startswith(
        "closed after 0.1 s; events left undelivered: interrupts (50), in one delivery for "
    )


def test_exit_goes_on_with_a_close_after_a_ctrl_c(python: Run) -> None:
    """A Ctrl-C at the end of `with Bus()` ends the program, which delivers the rest at its exit."""
    program = (
        """
import atexit
atexit.register(lambda: print("at the exit", len(seen)))
"""
        + INTERRUPTED
        + """
def hook(kind, error, traceback):
    print(kind.__name__, len(seen), flush=True)
    interrupted.set()
    go_on.set()
sys.excepthook = hook
with bus:
    pass
"""
    )

    ran = python(program)

    assert ran.stdout.splitlines() == ["KeyboardInterrupt 0", "at the exit 100"]
    assert (ran.returncode, ran.stderr) == (-signal.SIGINT, "")


def test_two_threads_that_close_hear_the_same(bus: Bus, held: Held) -> None:
    """The second waits for the first, and both report what became of the events; a third keeps its own deadline."""
    bus.subscribe(held, "after_train_iter", offload="thread")
    emit(bus, 3)
    reports: list[DrainReport] = []
    threads = [threading.Thread(target=lambda: reports.append(bus.close(DEADLINE))) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: bus.closed)

    impatient = bus.close(0.05)
    assert reports == []
    held.let_go()
    for thread in threads:
        thread.join(DEADLINE)

    assert (impatient.complete, impatient.stats[0].queued) == (False, 3)
    assert [(report.complete, report.stats[0].delivered) for report in reports] == [(True, 3)] * 2
    assert bus.close()


def test_close_in_a_signals_handler_during_a_close(bus: Bus, held: Held) -> None:
    """It goes on with the close that it interrupted, on the same thread; what that leaves neither calls complete."""
    subscriber: Any = bus.subscribe(held, "after_train_iter", offload="thread").subscriber
    emit(bus, 3)
    assert held.entered.wait(DEADLINE)
    inner: list[DrainReport] = []
    wait_closed = subscriber.wait_closed

    def interrupted(timeout: float) -> bool:
        if not inner:
            subscriber.wait_closed = wait_closed
            inner.append(bus.close(0.05))
            held.let_go()
        return bool(wait_closed(timeout))

    subscriber.wait_closed = interrupted
    outer = bus.close(0.3)

    assert (inner[0].complete, outer.complete) == (False, False)
    until(lambda: bus.stats()[0].queued == 2)
