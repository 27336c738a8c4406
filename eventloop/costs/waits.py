"""Measure the waits of a training thread for a checkpoint, for the background or for other ranks.

Code that waits does so in a `waiting` block. It needs no reference to a trainer, because the wait counts for
the runs that are under way on its thread.

    if not written.done():
        with waiting("checkpoint", "best checkpoints"):
            written.wait()

`StepClock` excludes the wait from the phase or evaluation in which it was spent, and the bus excludes it from
the times of the handlers that are being called.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import FrameType
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from eventloop.costs.records import Cause, Place, WaitCost


class Wait(NamedTuple):
    """One wait of the training thread."""

    cause: Cause
    name: str
    """The object of the wait, such as the name of a background subscriber; "" without a name."""
    began: float
    """The time at which the wait began, in seconds by `perf_counter`."""
    seconds: float


class Waiter(Protocol):
    """An object that counts the waits in a run, such as a `StepClock`."""

    def waited(self, wait: Wait) -> None:
        """Count a wait that has just ended."""


ExcludeWait = Callable[[float], None]
_exclusions: list[ExcludeWait] = []


def excludes_waits(exclude: ExcludeWait) -> ExcludeWait:
    """Register a function that excludes a wait from the calls that are being measured, and return it.

    It is called with the seconds of each wait, on the thread that waited. It finds the measured calls in the
    thread's stack frames (`frames_here`); to list them as they begin and end would slow down each call.
    """
    _exclusions.append(exclude)
    return exclude


def frames_here() -> Iterator[FrameType]:
    """Yield the frames of the calling thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


class _Thread(threading.local):
    """The state of the calling thread."""

    def __init__(self) -> None:
        # the runs under way; a run that a handler has begun comes after the run of the handler
        self.runs: list[Waiter] = []
        self.waits = False  # whether the thread is within a `waiting` block


_thread = _Thread()


@contextmanager
def waiting(cause: Cause, name: str = "") -> Iterator[None]:
    """Count the time of the block as a wait of each run under way on this thread.

    A block within another one counts nothing, because the outer block counts the whole time.

    Args:
        cause: the reason of the wait.
        name: the subscriber or other object of the wait, for the report; keep the number of names small.
    """
    thread = _thread
    if thread.waits or not thread.runs:
        yield
        return
    thread.waits, began = True, perf_counter()
    try:
        yield
    finally:
        wait = Wait(cause, name, began, perf_counter() - began)
        thread.waits = False
        for exclude in _exclusions:
            exclude(wait.seconds)
        for run in thread.runs:
            run.waited(wait)


class Waits:
    """The waits of one run, summed by cause, part of the run, and name.

    Attributes:
        place: the part of the run that is under way.
        seconds: the seconds of all waits.
        watchers: functions that are called with each wait after its end, on the thread that waited.
    """

    def __init__(self) -> None:
        self.place: Place = "between"
        self.seconds = 0.0
        self.watchers: list[Callable[[Wait], None]] = []
        self._sums: dict[tuple[Cause, Place, str], WaitCost] = {}
        self._runs_of_thread: list[Waiter] = []  # the list of runs of the thread that called `begin`

    def begin(self, run: Waiter) -> None:
        """Count the waits of the calling thread for a run, until `end`."""
        self.end(run)
        _thread.waits = False  # the error of a signal handler may have skipped the end of a `waiting` block
        self._runs_of_thread = _thread.runs
        self._runs_of_thread.append(run)

    def end(self, run: Waiter) -> None:
        """Stop counting waits for a run; any thread may call this."""
        if run in self._runs_of_thread:
            self._runs_of_thread.remove(run)

    def add(self, wait: Wait) -> None:
        """Add a wait that has ended to the sums, and call the watchers."""
        key = wait.cause, self.place, wait.name
        past = self._sums.get(key) or WaitCost(*key)
        self._sums[key] = replace(
            past,
            calls=past.calls + 1,
            seconds=past.seconds + wait.seconds,
            longest=max(past.longest, wait.seconds),
        )
        self.seconds += wait.seconds
        for watch in self.watchers:
            watch(wait)

    def records(self) -> list[WaitCost]:
        """Return the sums by cause, part of the run and name, the longest first."""
        return sorted(self._sums.copy().values(), key=lambda wait: -wait.seconds)
