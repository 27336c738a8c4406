"""Sum up durations: their exact sum and maximum, and a histogram of their sizes."""

from __future__ import annotations

from collections.abc import Callable
from math import log2

from eventloop.costs.records import Times

_STEPS = 1 / log2(1.05)
"""Durations are counted in steps of 5 %, the accuracy of a percentile: some hundred counters at most."""
_LEAST_SECONDS = 1e-9


class Timing:
    """The durations in seconds of one kind of call.

    `seconds` and `longest` are exact for the `clocked` calls. The `sampled` ones among them stand for calls
    that were not clocked (see `eventloop.costs.sampling`), which have the mean of these.
    """

    __slots__ = ("_counts", "_sampled_seconds", "budget", "clocked", "longest", "sampled", "seconds")

    def __init__(self) -> None:
        self.clocked = self.sampled = 0
        self.seconds = self.longest = self._sampled_seconds = 0.0
        self.budget: Budget | None = None
        self._counts: dict[float, int] = {}

    def add(self, seconds: float, sampled: bool = False) -> None:
        """Add one clocked call; a `sampled` one stands for calls that were not clocked, too."""
        self.clocked += 1
        self.seconds += seconds
        if seconds > self.longest:  # noqa: PLR1730 - `max` takes three times as long
            self.longest = seconds
        if sampled:
            self.sampled += 1
            self._sampled_seconds += seconds
        # `_step`, whose call would cost a third more (`benchmarks.accounting`)
        step = log2(seconds if seconds > _LEAST_SECONDS else _LEAST_SECONDS) * _STEPS // 1  # noqa: FURB136
        self._counts[step] = self._counts.get(step, 0) + 1
        if self.budget is not None and seconds > self.budget.seconds:
            self.budget.overrun(self)

    def add_run(self, calls: int, seconds: float, longest: float) -> None:
        """Add short calls that were clocked together, which the histogram takes as equally long.

        Args:
            seconds: of all of them.
        """
        self.clocked += calls
        self.seconds += seconds
        self.longest = max(self.longest, longest)
        step = _step(seconds / calls)
        self._counts[step] = self._counts.get(step, 0) + calls

    def estimate(self, calls: int) -> float:
        """Return the seconds of `calls` calls: exact if all were clocked, else estimated for the others."""
        mean = self._sampled_seconds / self.sampled if self.sampled else self.seconds / max(1, self.clocked)
        return self.seconds + mean * max(0, calls - self.clocked)

    def percentile(self, share: float) -> float:
        """Return the duration in seconds that a `share` (0..1) of the clocked calls do not exceed.

        It is accurate within 5 %, and 0.0 without calls.
        """
        counts = dict(self._counts)  # another thread may be adding
        left = share * sum(counts.values())
        for step in sorted(counts):
            left -= counts[step]
            if left <= 0:
                return min(self.longest, 2 ** ((step + 0.5) / _STEPS))
        return self.longest

    def times(self, calls: int | None = None) -> Times:
        """Return the distribution over `calls` calls, by default those that were clocked."""
        calls = calls or self.clocked
        mean = self.estimate(calls) / calls if calls else 0.0
        p50, p90, p99 = (self.percentile(share) for share in (0.5, 0.9, 0.99))
        return Times(samples=self.clocked, mean=mean, p50=p50, p90=p90, p99=p99, max=self.longest)


def _step(seconds: float) -> float:
    return log2(max(seconds, _LEAST_SECONDS)) * _STEPS // 1


class Budget:
    """A limit on the p99 of a handler's calls. It is reported once when exceeded.

    It is exceeded as soon as more than one clocked call in a hundred took longer, and at least `LEAST` of
    them: a single call may have been interrupted, and the first call pays for set-up.

    Args:
        seconds: the budget.
        exceeded: called with the p99 in seconds.
    """

    __slots__ = ("_exceeded", "_over", "exceeded", "seconds")

    LEAST = 3

    def __init__(self, seconds: float, exceeded: Callable[[float], None]) -> None:
        self.seconds = seconds
        self.exceeded = False
        self._exceeded = exceeded
        self._over = 0

    def overrun(self, timing: Timing) -> None:
        """Count a call that took longer, which `timing` already has."""
        self._over += 1
        if not self.exceeded and self._over >= self.LEAST and self._over * 100 > timing.clocked:
            self.exceeded = True
            self._exceeded(timing.percentile(0.99))
