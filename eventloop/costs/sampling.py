"""Estimate the sum and distribution of durations from samples, and check budgets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import exp, log

from eventloop.costs.records import Times

_STEPS = 1 / log(1.05)
"""Durations are counted in steps of 5 %, the accuracy of a percentile, in some hundred numbers at most."""
_LEAST_SECONDS = 1e-9
_SETTLED = 32
"""Samples after which a run is past its first log, first garbage collection and the like."""
_ENOUGH = 8
"""Samples from which on the longest sample counts once only."""


class Pool:
    """Samples that stand for calls that were not measured."""

    __slots__ = ("_longest", "_longest_weight", "_seconds", "_weight", "samples")

    def __init__(self) -> None:
        self.samples = self._weight = self._longest_weight = 0
        self._seconds = self._longest = 0.0

    def add(self, seconds: float, weight: int) -> None:
        """Add a sample that stands for `weight` calls."""
        self.samples += 1
        self._weight += weight
        self._seconds += seconds * weight
        if seconds > self._longest:
            self._longest, self._longest_weight = seconds, weight

    def mean(self) -> float:
        """Return the mean, without the longest sample if there are enough samples.

        A sample that was interrupted for 30 ms would stand for thousands of calls. A handler that is rarely
        slow is therefore underestimated until it was sampled slow twice.
        """
        if self.samples < _ENOUGH:
            return self._seconds / max(1, self._weight)
        rest = self._seconds - self._longest * self._longest_weight
        return rest / (self._weight - self._longest_weight)


class Timing:
    """Durations of one kind of call, sampled, in seconds.

    A sample has a weight, the number of calls that it stands for. Samples of weight 1, where every call is
    measured, stand for themselves; the others for the calls between them. While there are few of the latter,
    the latest samples of weight 1 stand for them too. The first call pays for lazy set-up and stands for
    itself alone.
    """

    __slots__ = ("_counts", "_early", "_late", "_settled", "_whole", "_whole_seconds", "longest", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self.longest = 0.0
        self._whole = 0
        self._whole_seconds = 0.0
        self._early, self._settled, self._late = Pool(), Pool(), Pool()
        self._counts: dict[int, int] = {}

    def add(self, seconds: float, weight: int = 1) -> None:
        """Add one measured call, which stands for `weight` calls."""
        self.samples += 1
        self.longest = max(self.longest, seconds)
        if weight == 1:
            self._whole += 1
            self._whole_seconds += seconds
        else:
            self._late.add(seconds, weight)
        if self.samples == 1:
            return
        (self._early if self.samples <= _SETTLED else self._settled).add(seconds, 1)
        step = int(log(max(seconds, _LEAST_SECONDS) / _LEAST_SECONDS) * _STEPS)
        self._counts[step] = self._counts.get(step, 0) + weight

    def estimate(self, calls: int) -> float:
        """Estimate the time of `calls` calls: the measured sum, and a mean for each other call."""
        return self._whole_seconds + self._others_mean() * max(0, calls - self._whole)

    def _others_mean(self) -> float:
        for pool in (self._late, self._settled):
            if pool.samples >= 2 * _ENOUGH:
                return pool.mean()
        for pool in (self._settled, self._early):
            if pool.samples:
                return pool.mean()
        return self._whole_seconds if self._whole else self._late.mean()

    def percentile(self, share: float) -> float:
        """Return the duration in seconds that a `share` (0..1) of the calls do not exceed.

        It is accurate within 5 %, and 0.0 without samples.
        """
        counts = dict(self._counts)  # another thread may be adding
        left = share * sum(counts.values())
        for step in sorted(counts):
            left -= counts[step]
            if left <= 0:
                return min(self.longest, _LEAST_SECONDS * exp((step + 0.5) / _STEPS))
        return self.longest

    def times(self, calls: int | None = None) -> Times:
        """Return the distribution over `calls` calls; by default the number that the samples stand for."""
        calls = calls or sum(self._counts.values()) + min(1, self.samples)  # the first is not among them
        mean = self.estimate(calls) / calls if calls else 0.0
        return Times(self.samples, mean, self.percentile(0.5), self.percentile(0.99), self.longest)


class Waits:
    """Sample how long events wait in a queue, from their emit until they are taken out.

    A sample stands for all events since the sample before it.
    """

    __slots__ = ("_followed", "_last", "_taken", "timing")

    FOLLOWED = 1024
    """Events that are followed at a time, at most."""

    def __init__(self) -> None:
        self.timing = Timing()
        self._followed: deque[tuple[int, int, float]] = deque()  # number, weight, time of the emit
        self._taken, self._last = 0, -1

    def begin(self, emitted: float, ahead: int) -> None:
        """Follow an event that has entered the queue behind `ahead` others."""
        number = self._taken + ahead
        if len(self._followed) < self.FOLLOWED:
            self._followed.append((number, number - self._last, emitted))
            self._last = number

    def lost(self, count: int) -> None:
        """Count the oldest `count` events as dropped."""
        self._taken += count
        while self._followed and self._followed[0][0] < self._taken:
            self._followed.popleft()

    def taken(self, count: int, now: float) -> None:
        """Count the oldest `count` events as taken out."""
        self._taken += count
        while self._followed and self._followed[0][0] < self._taken:
            _, weight, emitted = self._followed.popleft()
            self.timing.add(now - emitted, weight)


class Budget:
    """A limit on the p99 of a handler's calls. It is reported once when exceeded.

    It is exceeded as soon as more than one sampled call in a hundred took longer, and at least `LEAST` of
    them: a single call may have been interrupted, and the first call pays for set-up.

    Args:
        seconds: the budget.
        exceeded: called with the p99 in seconds.
    """

    __slots__ = ("_exceeded", "_over", "_samples", "exceeded", "seconds")

    LEAST = 3

    def __init__(self, seconds: float, exceeded: Callable[[float], None]) -> None:
        self.seconds = seconds
        self.exceeded = False
        self._exceeded = exceeded
        self._samples = -1
        self._over = 0

    def look(self, seconds: float, timing: Timing) -> None:
        """Check a sampled call that `timing` already has."""
        self._samples += 1
        if seconds <= self.seconds or not self._samples or self.exceeded:
            return
        self._over += 1
        if self._over >= self.LEAST and self._over * 100 > self._samples:
            self.exceeded = True
            self._exceeded(timing.percentile(0.99))
