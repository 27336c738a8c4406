"""Count what a run waits for under its cause: a checkpoint, the background, other ranks.

Code that waits says so, and needs no trainer for it: the wait belongs to the runs under way on its thread.

    if not written.done():
        with waiting("checkpoint", "best checkpoints"):
            written.wait()

`StepClock` takes the wait out of the phase or evaluation in which it was spent, and the bus takes it out of
the times of the handlers that are being called. Where nothing waits, nothing is done.
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
    """One wait of the training thread, in seconds of `perf_counter`."""

    cause: Cause
    name: str
    """What was waited for, such as the name of a background subscriber."""
    began: float
    seconds: float


class Waiter(Protocol):
    """A run that counts the waits on its thread, such as a `StepClock`."""

    def waited(self, wait: Wait) -> None:
        """Count a wait that has just ended."""


ExcludeWait = Callable[[float], None]
_measurers: list[ExcludeWait] = []


def excludes_waits(measurer: ExcludeWait) -> ExcludeWait:
    """Register a function that excludes the seconds of a wait from calls that are being measured; return it.

    It is called once for each wait, on the thread that waited. It finds the calls by their frames: a stack of
    calls would slow down each of them.
    """
    _measurers.append(measurer)
    return measurer


def frames_here() -> Iterator[FrameType]:
    """Yield the frames of the calling thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


class _Thread(threading.local):
    def __init__(self) -> None:
        self.runs: list[Waiter] = []  # under way on this thread, a run within a handler of another one last
        self.waits = False  # whether the thread is within a `waiting` block


_thread = _Thread()


@contextmanager
def waiting(cause: Cause, name: str = "") -> Iterator[None]:
    """Count the time of the block as a wait of each run under way on this thread.

    A wait within another one is not counted again: the outer one is what the program asked for, and has the
    time of both.

    Args:
        cause: what the thread waits for.
        name: the subscriber, or another part of the cause, for the report; keep the number of names small.
    """
    here = _thread
    if here.waits or not here.runs:
        yield
        return
    here.waits, began = True, perf_counter()
    try:
        yield
    finally:
        wait = Wait(cause, name, began, perf_counter() - began)
        here.waits = False
        for exclude in _measurers:
            exclude(wait.seconds)
        for run in here.runs:
            run.waited(wait)


class Waits:
    """The waits of one run by cause, place and name.

    Attributes:
        place: the part of the run that is under way.
        seconds: the seconds of all waits.
        watchers: functions that are called with each wait when it has ended, on the thread that waited.
    """

    def __init__(self) -> None:
        self.place: Place = "between"
        self.seconds = 0.0
        self.watchers: list[Callable[[Wait], None]] = []
        self._found: dict[tuple[Cause, Place, str], WaitCost] = {}
        self._listed: list[Waiter] = []  # the runs of the thread on which this one is under way

    def begin(self, run: Waiter) -> None:
        """Count the waits of the calling thread for a run, until `end`."""
        self.end(run)
        _thread.waits = False  # a signal may have ended a wait before it could say so
        self._listed = _thread.runs
        self._listed.append(run)

    def end(self, run: Waiter) -> None:
        """Count no more waits for a run; any thread may call this."""
        if run in self._listed:
            self._listed.remove(run)

    def add(self, wait: Wait) -> None:
        """Add a wait that has ended to the sums, and call the watchers."""
        key = wait.cause, self.place, wait.name
        past = self._found.get(key) or WaitCost(*key)
        self._found[key] = replace(
            past,
            calls=past.calls + 1,
            seconds=past.seconds + wait.seconds,
            longest=max(past.longest, wait.seconds),
        )
        self.seconds += wait.seconds
        for watch in self.watchers:
            watch(wait)

    def records(self) -> list[WaitCost]:
        """Return the sums by cause, place and name, the longest first."""
        return sorted(self._found.copy().values(), key=lambda wait: -wait.seconds)
