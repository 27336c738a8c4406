"""Record the seconds of each handler over the course of a run, so that reports can compare runs.

`StepClock` makes the marks on the training thread. A mark takes some 15 us, and a run has a few hundred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Protocol

from eventloop.costs.records import HANDLER_POINT, IN_ITERATION
from eventloop.costs.timing import Timing

POINTS = 128
"""The largest number of points in a handler's trend; when it is reached, every second one is dropped."""


class Clocked(Protocol):
    """A handler with its measured times."""

    timing: Timing


class Signal(Protocol):
    """The handlers of one event, such as an `EventSignal`."""

    @property
    def handlers(self) -> Iterable[Clocked]:
        """The handlers that are subscribed now."""


SignalOf = Callable[[str], Signal]


class HandlerTrend:
    """The seconds of each handler at every `HANDLER_POINT`-th point of the run's trend (`TrendPoint`).

    Args:
        signal_of: returns the signal of an event, such as `Bus.signal`.
    """

    def __init__(self, signal_of: SignalOf) -> None:
        self._signals = [signal_of(event) for event in sorted(IN_ITERATION)]
        self._marks: list[dict[Timing, float]] = []  # the seconds of each handler so far
        self._stride = HANDLER_POINT

    def mark(self, iterations: int) -> None:
        """Record the seconds of each handler so far, if this number of iterations ends a point."""
        if iterations % self._stride:
            return
        timings = [handler.timing for signal in self._signals for handler in signal.handlers]
        sums = {timing: timing.clocked_seconds() for timing in timings}
        self._marks.append({timing: seconds for timing, seconds in sums.items() if seconds is not None})
        if len(self._marks) >= POINTS:
            self._marks = self._marks[1::2]
            self._stride *= 2

    def of(self, timing: Timing, seconds: float) -> list[float]:
        """Return the seconds of one handler in each point of its trend, rounded to a nanosecond.

        Args:
            timing: the handler's times.
            seconds: the handler's seconds in the whole run so far; the last point ends with them.
        """
        sums = [0.0]
        for mark in self._marks:
            # absent if the handler was not subscribed at this mark, or another thread was reading its times
            sums.append(mark.get(timing, sums[-1]))
        return [round(max(0.0, after - before), 9) for before, after in pairwise([*sums, seconds])]
