"""A close that is interrupted, or that two threads ask for: it is finished, and what is reported is true."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable

import pytest

from eventloop.bus import Bus
from eventloop.bus.subscription import DrainReport
from tests.conftest import DEADLINE, Held
from tests.support.process_support import emit, until

Run = Callable[..., subprocess.CompletedProcess[str]]

INTERRUPTED = """
import os, signal, sys, threading, time
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
def test_close_goes_on_after_a_ctrl_c(python: Run) -> None:
    """The next close delivers what the interrupted one had not."""
    program = (
        INTERRUPTED
        + """
try:
    bus.close()
except KeyboardInterrupt:
    print("interrupted", len(seen))
interrupted.set()
go_on.set()
report = bus.close()
print(report.complete, len(seen), report.stats[0].delivered, report.stats[0].queued)
"""
    )

    ran = python(program)

    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == ["interrupted 0", "True 100 100 0"]


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
for report in bus.close(0.1), bus.close(0.1):
    print(report.complete, report.stats[0].delivered, report.stats[0].queued)
"""
    )

    ran = python(program)

    assert ran.returncode == 0
    assert ran.stdout.splitlines() == ["False 50 50"] * 2
    assert ran.stderr.splitlines() == ["closed after 0.1 s; events left undelivered: interrupts (50)"]


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


def close_on_a_thread(bus: Bus, reports: list[DrainReport]) -> threading.Thread:
    """Returns once it waits for the subscribers."""
    thread = threading.Thread(target=lambda: reports.append(bus.close(DEADLINE)))
    lanes = list(bus._background.lanes)
    thread.start()
    until(lambda: all(lane._closing for lane in lanes))
    return thread


def test_two_threads_that_close_hear_the_same(bus: Bus, held: Held) -> None:
    """The second waits for the first, and both report what became of the events."""
    bus.subscribe(held, "after_train_iter", offload="thread")
    emit(bus, 3)
    reports: list[DrainReport] = []
    threads = [close_on_a_thread(bus, reports) for _ in range(2)]
    assert reports == []
    held.let_go()
    for thread in threads:
        thread.join(DEADLINE)

    assert [(report.complete, report.stats[0].delivered) for report in reports] == [(True, 3)] * 2


def test_second_thread_that_closes_keeps_its_deadline(bus: Bus, held: Held) -> None:
    """It says that the first is not done, and takes nothing from it."""
    bus.subscribe(held, "after_train_iter", offload="thread")
    emit(bus, 3)
    reports: list[DrainReport] = []
    thread = close_on_a_thread(bus, reports)

    impatient = bus.close(0.05)
    held.let_go()
    thread.join(DEADLINE)

    assert (impatient.complete, impatient.stats[0].queued) == (False, 3)
    assert [(report.complete, report.stats[0].delivered) for report in reports] == [(True, 3)]
    assert bus.close()


def test_close_in_a_signals_handler_during_a_close(bus: Bus, held: Held) -> None:
    """It goes on with the close that it interrupted, on the same thread; what that leaves neither calls complete."""
    bus.subscribe(held, "after_train_iter", offload="thread")
    emit(bus, 3)
    assert held.entered.wait(DEADLINE)
    inner: list[DrainReport] = []
    lane = bus._background.lanes[0]
    wait_closed = lane.wait_closed

    def interrupted(timeout: float) -> bool:
        if not inner:
            lane.wait_closed = wait_closed  # type: ignore[method-assign]
            inner.append(bus.close(0.05))
            held.let_go()
        return wait_closed(timeout)

    lane.wait_closed = interrupted  # type: ignore[method-assign]
    outer = bus.close(DEADLINE)

    assert (inner[0].complete, outer.complete) == (False, False)
    until(lambda: bus.stats()[0].queued == 2)
