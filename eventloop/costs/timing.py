"""Accumulate the durations of calls: their exact sum and maximum, and a histogram for percentiles."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from math import log2

from eventloop.costs.records import Times

BATCH = 256
"""The number of durations that are added to the sums at a time.

Adding each duration at once would cost an iteration twice as much (`benchmarks.accounting`).
"""
_BINS_PER_DOUBLING = 1 / log2(1.05)
"""The number of bins of the histogram for each doubling of the duration.

A bin is 5 % wide, which is the accuracy of the percentiles. Some hundred bins are in use at most.
"""
_LEAST_SECONDS = 1e-9
"""The upper limit of the durations that the first bin of the histogram counts."""


class Timing:
    """The durations in seconds of one kind of call.

    One thread adds durations. Any thread may read the results, which include all durations added so far.

    Attributes:
        recent: the durations that are not in the sums yet. A negative number is a wait, which is subtracted
            from the next duration. Without a budget, the adding thread may append to this list itself if it
            calls `sum_up` at least once in `BATCH` calls.
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
        # the number of calls in the sums, and how many of them were a sample of more calls
        self._clocked = self._sampled = 0
        self._seconds = self._longest = self._sampled_seconds = 0.0
        self._has_waits = False  # whether `recent` has negative numbers
        self._sampling = False  # whether the recent durations are a sample of the calls
        self._counts: Counter[float] = Counter()  # the number of calls in each bin of the histogram
        self._lock = threading.RLock()  # reentrant, because `times` calls other methods that acquire it

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
        """Exclude a wait from the duration of the measured call that is under way.

        The thread that makes the call, and adds its duration afterwards, calls this method within it.
        """
        if seconds > 0:
            with self._lock:
                self.recent.append(-seconds)
                self._has_waits = True

    def _waits(self) -> float:
        """Return the waits in the call that is about to be added, summed, as a negative number of seconds."""
        return sum(takewhile(lambda seconds: seconds < 0, reversed(self.recent)))

    def add_run(self, calls: int, seconds: float, longest: float) -> None:
        """Add several short calls that were measured together.

        Args:
            calls: the number of calls.
            seconds: the sum of their durations. In the histogram all calls count as equally long.
            longest: the longest of their durations, in seconds.
        """
        with self._lock:
            self._clocked += calls
            self._seconds += seconds
            self._longest = max(self._longest, longest)
            self._counts[_bin(seconds / calls)] += calls

    def begin_sampling(self, sampling: bool) -> None:
        """Set whether from now on only a sample of the calls is measured, which stands for all of them."""
        self.sum_up()
        self._sampling = sampling

    def sum_up(self) -> None:
        """Add the recent durations to the sums, unless a reading thread is doing so at this moment.

        The adding thread calls this method, and never waits for a reading thread.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._sum_up()
            finally:
                self._lock.release()

    def _sum_up(self) -> None:
        """Add the recent durations to the sums; the caller holds the lock."""
        durations = self.recent[:]
        if not durations:
            return
        if self._has_waits:
            # waits after the last duration belong to a call that is under way, and stay in the list
            ended = max((i for i, seconds in enumerate(durations, 1) if seconds >= 0), default=0)
            self._has_waits = ended < len(durations)
            del self.recent[:ended]
            if not (durations := _without_waits(durations[:ended])):
                return
        else:
            del self.recent[: len(durations)]  # the adding thread may have appended others meanwhile
        total = sum(durations)
        self._clocked += len(durations)
        self._seconds += total
        self._longest = max(self._longest, *durations)
        if self._sampling:
            self._sampled += len(durations)
            self._sampled_seconds += total
        # `_bin` written out, because calls of it would take twice as long (`benchmarks.accounting`)
        self._counts.update(
            [log2(s) * _BINS_PER_DOUBLING // 1 if s > _LEAST_SECONDS else _FIRST_BIN for s in durations]
        )

    @property
    def clocked(self) -> int:
        """Return the number of measured calls."""
        with self._lock:
            self._sum_up()
            return self._clocked

    def clocked_seconds(self) -> float | None:
        """Return the seconds of all measured calls; None at once if another thread is reading the results."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._seconds + sum(self.recent)
        finally:
            self._lock.release()

    def estimate(self, calls: int) -> float:
        """Return the total seconds of `calls` calls, of which some may not have been measured.

        Each call that was not measured counts as the mean of the calls in the sample.
        """
        with self._lock:
            self._sum_up()
            mean = self._seconds / max(1, self._clocked)
            if self._sampled:
                mean = self._sampled_seconds / self._sampled
            return self._seconds + mean * max(0, calls - self._clocked)

    def percentile(self, share: float) -> float:
        """Return a percentile of the measured calls in seconds, accurate within 5 %; 0.0 without calls.

        Args:
            share: the part of the calls, 0..1, that last no longer than the result.
        """
        with self._lock:
            self._sum_up()
            remaining_calls = share * self._clocked
            for number in sorted(self._counts):
                remaining_calls -= self._counts[number]
                if remaining_calls <= 0:
                    return min(self._longest, 2 ** ((number + 0.5) / _BINS_PER_DOUBLING))
            return self._longest

    def histogram(self) -> list[tuple[float, int]]:
        """Return the bins of the histogram that contain calls, the shortest durations first.

        Returns:
            for each bin its lower edge in seconds, and the number of calls. A bin is 5 % wide.
        """
        with self._lock:
            self._sum_up()
            return [
                (2 ** (number / _BINS_PER_DOUBLING), self._counts[number]) for number in sorted(self._counts)
            ]

    def times(self, calls: int | None = None) -> Times:
        """Return the distribution of the durations.

        Args:
            calls: the number of all calls, for the estimated mean; None if all calls were measured.
        """
        with self._lock:
            calls = calls or self.clocked
            mean = self.estimate(calls) / calls if calls else 0.0
            p50, p90, p99 = (self.percentile(share) for share in (0.5, 0.9, 0.99))
            return Times(samples=self._clocked, mean=mean, p50=p50, p90=p90, p99=p99, max=self._longest)


def _without_waits(recent: list[float]) -> list[float]:
    """Return the durations in a list, each without the waits before it, which are negative numbers."""
    durations, waits = [], 0.0
    for seconds in recent:
        if seconds < 0:
            waits += seconds
        else:
            durations.append(max(0.0, seconds + waits))
            waits = 0.0
    return durations


def _bin(seconds: float) -> float:
    """Return the number of the histogram's bin for a duration; bin 0 begins at one second."""
    return log2(max(seconds, _LEAST_SECONDS)) * _BINS_PER_DOUBLING // 1


_FIRST_BIN = _bin(_LEAST_SECONDS)


class Budget:
    """A limit for the 99th percentile of a handler's calls; the first time it is exceeded, this is reported.

    The limit is exceeded as soon as more than one measured call in a hundred, and at least `LEAST` calls,
    took longer. A single long call may have been interrupted, and the first call may include set-up.

    Args:
        seconds: the limit in seconds.
        exceeded: called once with the 99th percentile in seconds when the limit is exceeded.
    """

    __slots__ = ("_over", "_report", "exceeded", "seconds")

    LEAST = 3

    def __init__(self, seconds: float, exceeded: Callable[[float], None]) -> None:
        self.seconds = seconds
        self.exceeded = False
        self._report = exceeded
        self._over = 0

    def overrun(self, timing: Timing) -> None:
        """Count a call that took longer than the limit, and report if the 99th percentile now exceeds it.

        Args:
            timing: the durations of all calls, including this one.
        """
        self._over += 1
        if not self.exceeded and self._over >= self.LEAST and self._over * 100 > timing.clocked:
            self.exceeded = True
            self._report(timing.percentile(0.99))
