"""Compare the times of the ranks while they train; the sums that stop all ranks at once carry them."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from eventloop.costs.ranks import WINDOW, SlowRankWatch, Straggler, Window, summed
from eventloop.costs.records import Phases
from eventloop.costs.step_clock import NOTHING, StepClock, phases_between

RANKS = 32
"""Ranks that are compared every few iterations, for some 0.1 ms an iteration; more ranks less often."""
LEAST_ITERATIONS = WINDOW // 2
"""Iterations that are judged together at least."""
_WIDTH = len(NOTHING)
"""Numbers of a rank: those of the sums of its clock."""


class TimesExchange:
    """Exchange the phases of all ranks every few iterations, and find the slow rank. See `Carried`.

    Nothing waits for it: the numbers travel with sums that all ranks add up at the ends of their iterations
    anyway. All ranks get the same numbers at the same boundary, so they find the same rank.
    """

    def __init__(self, clock: StepClock, rank: int, world_size: int) -> None:
        self._clock, self._rank, self._world_size = clock, rank, world_size
        self.every = WINDOW * ceil(world_size / RANKS)
        self._before = clock.sums()
        self._watch = SlowRankWatch()
        self._gathered: Window | None = None
        self.found: Straggler | None = None
        """A slow rank that was found and not announced yet."""

    def numbers(self) -> list[float]:
        """Return the clock's sums since the last call, among zeros in the places of the other ranks."""
        numbers = [0.0] * (_WIDTH * self._world_size)
        now, begin = self._clock.sums(), _WIDTH * self._rank
        numbers[begin : begin + _WIDTH] = [b - a for a, b in zip(self._before, now, strict=True)]
        self._before = now
        return numbers

    def take(self, numbers: Sequence[float]) -> None:
        """Take the sums of all ranks. Few iterations, as around an evaluation, wait for more."""
        window: Window = [self._phases(numbers[i : i + _WIDTH]) for i in range(0, len(numbers), _WIDTH)]
        if self._gathered is not None:
            window = summed([self._gathered, window])
        if min(phases.iterations for phases in window) < LEAST_ITERATIONS:
            self._gathered = window
        else:
            self._gathered = None
            self.found = self._watch.add(window) or self.found

    def _phases(self, row: Sequence[float]) -> Phases:
        iterations, *seconds = row
        data, forward, backward, optimizer, hooks, total = seconds
        return phases_between(NOTHING, (round(iterations), data, forward, backward, optimizer, hooks, total))
