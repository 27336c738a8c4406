"""Record the seconds of each handler over the course of a run, so that reports can compare runs.

`StepClock` calls `HandlerTrend.mark` on the training thread at regular iterations. A call takes some 15 us,
and a run has a few hundred calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Protocol

from eventloop.costs.records import HANDLER_POINT, IN_ITERATION
from eventloop.costs.timing import Timing

POINTS = 128
"""The number of points in a handler's trend at which every second point is dropped."""


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
    """The trend of each handler: its seconds in successive parts of the run of equally many iterations.

    Args:
        signal_of: returns an object with the handlers of an event, such as `Bus.signal`.
    """

    def __init__(self, signal_of: SignalOf) -> None:
        self._signals = [signal_of(event) for event in sorted(IN_ITERATION)]
        self._marks: list[dict[Timing, float]] = []  # the seconds of each handler up to the end of each point
        self._stride = HANDLER_POINT  # iterations from one mark to the next

    def mark(self, iterations: int) -> None:
        """Record the seconds of each handler so far, if a point of the trend ends after `iterations`."""
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
            timing: the durations of the handler's calls.
            seconds: the handler's seconds in the whole run so far, at which the last point ends.
        """
        sums = [0.0]
        for mark in self._marks:
            # a mark lacks a handler that was not subscribed, or whose times another thread was reading
            sums.append(mark.get(timing, sums[-1]))
        return [round(max(0.0, after - before), 9) for before, after in pairwise([*sums, seconds])]
