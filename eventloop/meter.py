"""What handlers cost: exact call counts and sampled times, at the price of one `next` in C per event.

A clock pair around every call would cost more than most handlers do. Instead each compiled plan draws from a
`Ticker`; a drawn True sends that one event down a measured twin of the plan. All of the first `WARM_UP` events
are measured (an epoch event may never see more), later ones every `PERIOD`-th. The period is prime, so that a
handler that works every 10th or 100th iteration is met as often as its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle, repeat

WARM_UP = 64
PERIOD = 127


class Ticker:
    """Says which events to measure, and how many there were."""

    __slots__ = ("measured", "ticks", "warm_up")

    def __init__(self, warm_up: int = WARM_UP) -> None:
        self.warm_up = warm_up
        self.measured = 0
        lap = [False] * (PERIOD - 1) + [True]
        self.ticks: Iterator[bool] = chain(repeat(True, warm_up), cycle(lap))

    def settle(self) -> int:
        """Return how often `ticks` was drawn. It uses the iterator up: the plan must have left it already."""
        if self.measured < self.warm_up:
            return self.measured
        laps = self.measured - self.warm_up
        left_in_this_lap = next(i for i, tick in enumerate(self.ticks, start=1) if tick)
        return self.warm_up + laps * PERIOD + PERIOD - left_in_this_lap


class Timing:
    """Sampled durations of one handler of one event, in seconds."""

    __slots__ = ("longest", "samples", "seconds", "steady_samples", "steady_seconds")

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0
        self.steady_samples = 0
        self.steady_seconds = 0.0
        self.longest = 0.0

    def add(self, seconds: float) -> None:
        """Record one measured call."""
        self.samples += 1
        self.seconds += seconds
        if self.samples > 1:  # the first call pays for lazy set-up and would stand for thousands
            self.steady_samples += 1
            self.steady_seconds += seconds
        self.longest = max(self.longest, seconds)

    def mean(self) -> float:
        """Mean of the steady calls, 0.0 when nothing was measured."""
        if self.steady_samples:
            return self.steady_seconds / self.steady_samples
        return self.seconds

    def estimate(self, calls: int) -> float:
        """Total over `calls` calls: what was measured, plus the mean for each call that was not."""
        return self.seconds + self.mean() * max(0, calls - self.samples)
