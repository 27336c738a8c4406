"""Compare the times of the ranks during training, to find a slow rank.

The times are sent with the all-reduce by which the ranks agree on a stop (`rank_stop`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from eventloop.costs.ranks import WINDOW, SlowRankWatch, Straggler, Window, summed
from eventloop.costs.records import Phases
from eventloop.costs.step_clock import NOTHING, StepClock, phases_between

RANKS = 32
"""The largest number of ranks that exchange times every WINDOW iterations; more ranks do so less often.

For 32 ranks the exchange takes about 0.1 ms an iteration on average.
"""
LEAST_ITERATIONS = WINDOW // 2
"""The least number of iterations over which times are averaged for a comparison."""
_WIDTH = len(NOTHING)
"""The number of numbers that a rank sends: one for each sum of its StepClock."""


class TimesExchange:
    """Exchange the phase times of all ranks every few iterations, and find the slow rank.

    `Agreement` sends the times with sums that the ranks exchange in any case (`Carried`), so training does
    not wait for them. All ranks receive the same times at the same boundary, so they find the same slow rank.
    """

    def __init__(self, clock: StepClock, rank: int, world_size: int) -> None:
        self._clock, self._rank, self._world_size = clock, rank, world_size
        self.every = WINDOW * ceil(world_size / RANKS)
        self._last_sums = clock.sums()
        self._watch = SlowRankWatch()
        self._short_window: Window | None = None  # times over too few iterations for a comparison
        self.found: Straggler | None = None
        """A slow rank that `Stopping` has not announced yet, or None."""

    def numbers(self) -> list[float]:
        """Return a list of the times of all ranks since the last call, with zeros for the other ranks."""
        numbers = [0.0] * (_WIDTH * self._world_size)
        sums, own_begin = self._clock.sums(), _WIDTH * self._rank
        times = [now - before for before, now in zip(self._last_sums, sums, strict=True)]
        numbers[own_begin : own_begin + _WIDTH] = times
        self._last_sums = sums
        return numbers

    def receive(self, numbers: Sequence[float]) -> None:
        """Receive the times of all ranks, and compare the ranks.

        Times that cover too few iterations, as around an evaluation, are added to the times received next.
        """
        # the phases of each rank since the last exchange
        window: Window = [self._phases(numbers[i : i + _WIDTH]) for i in range(0, len(numbers), _WIDTH)]
        if self._short_window is not None:
            window = summed([self._short_window, window])
        if min(phases.iterations for phases in window) < LEAST_ITERATIONS:
            self._short_window = window
        else:
            self._short_window = None
            self.found = self._watch.add(window) or self.found

    def _phases(self, times: Sequence[float]) -> Phases:
        """Return the times of one rank as phases; `times` has the order of `StepClock.sums`, in seconds."""
        iterations, data, forward, backward, optimizer, hooks, checkpoint, background, ranks, total = times
        seconds = (data, forward, backward, optimizer, hooks, checkpoint, background, ranks, total)
        return phases_between(NOTHING, (round(iterations), *seconds))
