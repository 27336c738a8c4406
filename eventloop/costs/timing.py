"""Accumulate durations: their exact sum and maximum, and a histogram."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from math import log2

from eventloop.costs.records import Times

BATCH = 256
"""The number of durations that are added to the sums at a time.

Adding them one by one costs an iteration twice as much (`benchmarks.accounting`).
"""
_BINS_PER_DOUBLING = 1 / log2(1.05)
"""The number of bins of the histogram for each doubling of the duration.

A bin is 5 % wide, which is the accuracy of the percentiles; some hundred bins are in use at most.
"""
_LEAST_SECONDS = 1e-9


class Timing:
    """The durations in seconds of one kind of call.

    One thread adds durations. Any thread may read the results, which include all durations added so far.

    Attributes:
        recent: the durations that are not in the sums yet. A negative one is a wait that the next duration
            still includes. Without a budget, the adding thread may append to it directly if it calls `sum_up`
            at least once in `BATCH` calls.
        budget: a limit that is checked at each `add`; None without one.
    """

    __slots__ = (
        "_clocked",
        "_counts",
        "_has_waits",
        "_lock",
        "_longest",
        "_sampled",
        "_sampled_seconds",
        "_sampling",
        "_seconds",
        "budget",
        "recent",
    )

    def __init__(self) -> None:
        self.recent: list[float] = []
        self.budget: Budget | None = None
        self._clocked = self._sampled = 0  # calls in the sums, and those of them added while sampling
        self._seconds = self._longest = self._sampled_seconds = 0.0
        self._has_waits = False  # whether `recent` has negative numbers
        self._sampling = False  # whether the recent durations stand for calls that were not clocked, too
        self._counts: Counter[float] = Counter()  # calls by the number of their bin
        self._lock = threading.RLock()  # reentrant: `times` calls other methods that take it

    def add(self, seconds: float) -> None:
        """Add the duration of one call."""
        if self.budget is not None and seconds > self.budget.seconds:
            over = seconds + self._waits() > self.budget.seconds
            self.recent.append(seconds)
            if over:
                self.budget.overrun(self)
        else:
            self.recent.append(seconds)
        if len(self.recent) >= BATCH:
            self.sum_up()

    def exclude(self, seconds: float) -> None:
        """Exclude a wait from the duration of the call under way, which is the next one to be added.

        The adding thread calls it within that call.
        """
        if seconds > 0:
            with self._lock:
                self.recent.append(-seconds)
                self._has_waits = True

    def _waits(self) -> float:
        """Return the waits of the call that is about to be added, as a negative number of seconds."""
        return sum(takewhile(lambda seconds: seconds < 0, reversed(self.recent)))

    def add_run(self, calls: int, seconds: float, longest: float) -> None:
        """Add several short calls that were clocked together.

        Args:
            calls: the number of calls.
            seconds: the sum of their durations; the histogram counts all calls as equally long.
            longest: the longest of their durations, in seconds.
        """
        with self._lock:
            self._clocked += calls
            self._seconds += seconds
            self._longest = max(self._longest, longest)
            self._counts[_bin(seconds / calls)] += calls

    def begin_sampling(self, sampling: bool) -> None:
        """Set whether later calls are samples, from which the times of unmeasured calls are estimated."""
        self.sum_up()
        self._sampling = sampling

    def sum_up(self) -> None:
        """Add the recent durations to the sums, unless a reader is doing so at this moment.

        The adding thread calls it, and never waits for a reader.
        """
        if self._lock.acquire(blocking=False):  # else a reader sums up at this moment
            try:
                self._sum_up()
            finally:
                self._lock.release()

    def _sum_up(self) -> None:
        added = self.recent[:]
        if not added:
            return
        if self._has_waits:
            ended = max((i for i, each in enumerate(added, 1) if each >= 0), default=0)
            self._has_waits = ended < len(added)  # the call in which they were spent is under way
            del self.recent[:ended]
            if not (added := _without_waits(added[:ended])):
                return
        else:
            del self.recent[: len(added)]  # the adding thread may have appended meanwhile
        seconds = sum(added)
        self._clocked += len(added)
        self._seconds += seconds
        self._longest = max(self._longest, *added)
        if self._sampling:
            self._sampled += len(added)
            self._sampled_seconds += seconds
        # `_bin` written out, because a call of it takes twice as long (`benchmarks.accounting`)
        self._counts.update(
            [log2(s) * _BINS_PER_DOUBLING // 1 if s > _LEAST_SECONDS else _FIRST_BIN for s in added]
        )

    @property
    def clocked(self) -> int:
        """Return the number of measured calls."""
        with self._lock:
            self._sum_up()
            return self._clocked

    def clocked_seconds(self) -> float | None:
        """Return the seconds of all measured calls without waiting; None while another thread reads them."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._seconds + sum(self.recent)
        finally:
            self._lock.release()

    def estimate(self, calls: int) -> float:
        """Return the total seconds of `calls` calls: exact if all were clocked, else partly estimated.

        A call that was not clocked is taken to last as long as the mean of the calls clocked while sampling.
        """
        with self._lock:
            self._sum_up()
            mean = self._seconds / max(1, self._clocked)
            if self._sampled:
                mean = self._sampled_seconds / self._sampled
            return self._seconds + mean * max(0, calls - self._clocked)

    def percentile(self, share: float) -> float:
        """Return a percentile of the clocked calls, in seconds and accurate within 5 %; 0.0 without calls.

        Args:
            share: the part of the calls, 0..1, that last no longer than the result.
        """
        with self._lock:
            self._sum_up()
            left = share * self._clocked
            for number in sorted(self._counts):
                left -= self._counts[number]
                if left <= 0:
                    return min(self._longest, 2 ** ((number + 0.5) / _BINS_PER_DOUBLING))
            return self._longest

    def histogram(self) -> list[tuple[float, int]]:
        """Return (lower edge in seconds, number of calls) for each non-empty bin, the shortest first.

        A bin is 5 % wide.
        """
        with self._lock:
            self._sum_up()
            return [
                (2 ** (number / _BINS_PER_DOUBLING), self._counts[number]) for number in sorted(self._counts)
            ]

    def times(self, calls: int | None = None) -> Times:
        """Return the distribution of the times of `calls` calls; None means the clocked ones."""
        with self._lock:
            calls = calls or self.clocked
            mean = self.estimate(calls) / calls if calls else 0.0
            p50, p90, p99 = (self.percentile(share) for share in (0.5, 0.9, 0.99))
            return Times(samples=self._clocked, mean=mean, p50=p50, p90=p90, p99=p99, max=self._longest)


def _without_waits(added: list[float]) -> list[float]:
    """Return durations less the waits before each of them, which are negative."""
    found, waits = [], 0.0
    for seconds in added:
        if seconds < 0:
            waits += seconds
        else:
            found.append(max(0.0, seconds + waits))
            waits = 0.0
    return found


def _bin(seconds: float) -> float:
    """Return the number of the histogram's bin for a duration; the bin of a second has the number 0."""
    return log2(max(seconds, _LEAST_SECONDS)) * _BINS_PER_DOUBLING // 1


_FIRST_BIN = _bin(_LEAST_SECONDS)


class Budget:
    """A limit on the p99 of a handler's calls, which reports once that it is exceeded.

    The limit is exceeded as soon as more than one clocked call in a hundred took longer, and at least `LEAST`
    calls did: a single call may have been interrupted, and the first call includes set-up.

    Args:
        seconds: the limit on the p99, in seconds.
        exceeded: called with the p99 in seconds when the limit is exceeded.
    """

    __slots__ = ("_over", "_report", "exceeded", "seconds")

    LEAST = 3

    def __init__(self, seconds: float, exceeded: Callable[[float], None]) -> None:
        self.seconds = seconds
        self.exceeded = False
        self._report = exceeded
        self._over = 0

    def overrun(self, timing: Timing) -> None:
        """Count a call that took longer than the limit, and report it if the p99 now exceeds the limit.

        Args:
            timing: the durations of all calls, including this one.
        """
        self._over += 1
        if not self.exceeded and self._over >= self.LEAST and self._over * 100 > timing.clocked:
            self.exceeded = True
            self._report(timing.percentile(0.99))
