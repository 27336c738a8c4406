"""Compare the times of the ranks during training, to find a slow rank.

The all-reduce by which the ranks agree on a stop (`rank_stop`) carries the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from eventloop.costs.ranks import WINDOW, SlowRankWatch, Straggler, Window, summed
from eventloop.costs.records import Phases
from eventloop.costs.step_clock import NOTHING, StepClock, phases_between

RANKS = 32
"""The number of ranks up to which times are exchanged every WINDOW iterations.

The exchange then takes about 0.1 ms an iteration on average. More ranks exchange times less often.
"""
LEAST_ITERATIONS = WINDOW // 2
"""The least number of iterations over which times are averaged for a comparison."""
_WIDTH = len(NOTHING)
"""How many numbers a rank sends: one for each sum of its StepClock."""


class TimesExchange:
    """Exchange the phase times of all ranks every few iterations, and find the slow rank.

    It implements `Carried`, so training does not wait for it: the numbers travel with sums that all ranks add
    up at the ends of their iterations anyway. All ranks get the same numbers at the same boundary, so they
    find the same slow rank.
    """

    def __init__(self, clock: StepClock, rank: int, world_size: int) -> None:
        self._clock, self._rank, self._world_size = clock, rank, world_size
        self.every = WINDOW * ceil(world_size / RANKS)
        self._before = clock.sums()
        self._watch = SlowRankWatch()
        self._gathered: Window | None = None
        self.found: Straggler | None = None
        """A slow rank that was found and not announced yet, or None."""

    def numbers(self) -> list[float]:
        """Return the growth of the clock's sums since the last call, with zeros in the others' places."""
        numbers = [0.0] * (_WIDTH * self._world_size)
        now, begin = self._clock.sums(), _WIDTH * self._rank
        numbers[begin : begin + _WIDTH] = [b - a for a, b in zip(self._before, now, strict=True)]
        self._before = now
        return numbers

    def receive(self, numbers: Sequence[float]) -> None:
        """Receive the growth of all ranks' sums, and compare the ranks once it covers enough iterations.

        Around an evaluation it may cover few iterations; then it is added to the next one.
        """
        window: Window = [self._phases(numbers[i : i + _WIDTH]) for i in range(0, len(numbers), _WIDTH)]
        if self._gathered is not None:
            window = summed([self._gathered, window])
        if min(phases.iterations for phases in window) < LEAST_ITERATIONS:
            self._gathered = window
        else:
            self._gathered = None
            self.found = self._watch.add(window) or self.found

    def _phases(self, row: Sequence[float]) -> Phases:
        iterations, data, forward, backward, optimizer, hooks, checkpoint, background, ranks, total = row
        sums = (data, forward, backward, optimizer, hooks, checkpoint, background, ranks, total)
        return phases_between(NOTHING, (round(iterations), *sums))
