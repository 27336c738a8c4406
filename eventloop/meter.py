"""What handlers cost: exact call counts and sampled times, at the price of one `next` in C per event.

A clock pair around every call would cost more than most handlers do. Instead each compiled plan draws from a
`Ticker`; a drawn True sends that one event down a measured twin of the plan. All of the first `WARM_UP` events
are measured (an epoch event may never see more), then every `PERIODS[0]`-th, and after `LAPS` of those every
`PERIODS[1]`-th. The periods are prime, so that a handler that works every 10th or 100th iteration is met as often as
its neighbours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import chain, cycle, repeat
from math import exp, log

from eventloop.costs import Times

WARM_UP = 64
PERIODS = (127, 1021)
"""An event that is measured costs some 0.5 us a handler more: shared by so many it is a few nanoseconds."""
LAPS = 64
_STEPS = 1 / log(1.05)
"""Durations are counted in steps of 5 %: a percentile is known that well, in some hundred numbers at most."""
_LEAST_SECONDS = 1e-9


class Ticker:
    """Says which events to measure, and how many there were.

    Args:
        before: how many were measured by the tickers before this one, which goes on from there.
        always: measure each.
    """

    __slots__ = ("_laps", "_warm_up", "measured", "ticks")

    def __init__(self, before: int = 0, *, always: bool = False) -> None:
        self._warm_up = sys.maxsize if always else max(0, WARM_UP - before)
        self._laps = min(LAPS, max(0, WARM_UP + LAPS - before))
        self.measured = 0
        short, long = ([False] * (period - 1) + [True] for period in PERIODS)
        self.ticks: Iterator[bool] = chain(
            repeat(True, self._warm_up), chain.from_iterable(repeat(short, self._laps)), cycle(long)
        )

    def settle(self) -> int:
        """Return how often `ticks` was drawn. It uses the iterator up: the plan must have left it already."""
        if self.measured < self._warm_up:
            return self.measured
        laps = self.measured - self._warm_up
        short, long = min(laps, self._laps), max(0, laps - self._laps)
        period = PERIODS[0] if laps < self._laps else PERIODS[1]
        left_in_this_lap = next(i for i, tick in enumerate(self.ticks, start=1) if tick)
        return self._warm_up + short * PERIODS[0] + long * PERIODS[1] + period - left_in_this_lap


class Timing:
    """Sampled durations of one thing, in seconds: how many, how long in all, and how they are distributed."""

    __slots__ = ("_counts", "longest", "samples", "seconds", "steady_samples", "steady_seconds")

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0
        self.steady_samples = 0
        self.steady_seconds = 0.0
        self.longest = 0.0
        self._counts: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        """Record one measured call."""
        self.samples += 1
        self.seconds += seconds
        if self.samples > 1:  # the first call pays for lazy set-up and would stand for thousands
            self.steady_samples += 1
            self.steady_seconds += seconds
        self.longest = max(self.longest, seconds)
        step = int(log(max(seconds, _LEAST_SECONDS) / _LEAST_SECONDS) * _STEPS)
        self._counts[step] = self._counts.get(step, 0) + 1

    def mean(self) -> float:
        """Mean of the steady calls, 0.0 when nothing was measured."""
        if self.steady_samples:
            return self.steady_seconds / self.steady_samples
        return self.seconds

    def estimate(self, calls: int) -> float:
        """Total over `calls` calls: what was measured, plus the mean for each call that was not."""
        return self.seconds + self.mean() * max(0, calls - self.samples)

    def percentile(self, share: float) -> float:
        """The duration that `share` (0..1) of the samples do not exceed, within 5 %; 0.0 when there is none."""
        counts = dict(self._counts)  # another thread may be adding
        left = share * sum(counts.values())
        for step in sorted(counts):
            left -= counts[step]
            if left <= 0:
                return min(self.longest, _LEAST_SECONDS * exp((step + 0.5) / _STEPS))
        return self.longest

    def times(self) -> Times:
        """The record of it."""
        return Times(self.samples, self.mean(), self.percentile(0.5), self.percentile(0.99), self.longest)


class Waits:
    """How long events wait in a queue: one at a time is followed from its emit until it is taken out."""

    __slots__ = ("_ahead", "_emitted", "timing")

    def __init__(self) -> None:
        self.timing = Timing()
        self._emitted = 0.0  # 0.0: none is followed
        self._ahead = 0

    def begin(self, emitted: float, ahead: int) -> None:
        """Follow an event that has entered the queue behind `ahead` others, unless one is followed already."""
        if not self._emitted:
            self._emitted, self._ahead = emitted, ahead

    def lost(self, count: int) -> None:
        """The oldest `count` events were dropped."""
        self._ahead -= count
        if self._ahead < 0:
            self._emitted = 0.0

    def taken(self, count: int, now: float) -> None:
        """The oldest `count` events were taken out."""
        self._ahead -= count
        if self._ahead < 0 and self._emitted:
            self.timing.add(now - self._emitted)
            self._emitted = 0.0


class Budget:
    """What the p99 of a handler's calls should stay under; says once that it does not.

    It does not as soon as more than one sampled call in a hundred took longer, and at least `LEAST` of them did: a
    single call that was interrupted is nobody's cost, and the first one pays for set-up.

    Args:
        seconds: the budget.
        exceeded: told the p99 in seconds.
    """

    __slots__ = ("_exceeded", "_over", "_samples", "seconds")

    LEAST = 3

    def __init__(self, seconds: float, exceeded: Callable[[float], None]) -> None:
        self.seconds = seconds
        self._exceeded: Callable[[float], None] | None = exceeded
        self._samples = -1
        self._over = 0

    def look(self, seconds: float, timing: Timing) -> None:
        """Take note of a sampled call, which `timing` has already."""
        self._samples += 1
        if seconds <= self.seconds or not self._samples:
            return
        self._over += 1
        if self._over >= self.LEAST and self._over * 100 > self._samples and self._exceeded is not None:
            exceeded, self._exceeded = self._exceeded, None
            exceeded(timing.percentile(0.99))
