"""Where the time of an iteration goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING

from eventloop.costs.records import Phases, TrendPoint

if TYPE_CHECKING:
    from eventloop.training.device_clock import DeviceClock

POINTS = 512
"""Of the trend, at most; when there are more, every second one is forgotten."""

_Sums = tuple[int, float, float, float, float, float, float]
"""How many iterations, the seconds of their five phases, and their wall time."""
_NOTHING: _Sums = (0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class StepClock:
    """Seconds of the phases of the iteration under way, and their sums over the run.

    `data` is the wait for the loader and the move to the device, `forward` the train step (in a hand-written
    loop everything the body does), `backward` and `optimizer` what the optimizer hook does, `hooks` all other
    handlers of the iteration. What is left of the wall time went to the loop itself. Evaluations are no part of any
    of it: `excluded` is what they have taken so far, and times are read as `perf_counter() - clock.excluded`. On a
    GPU these are the times of the training thread, which runs ahead of the device; `device` has the device's.
    """

    __slots__ = (
        "_marks", "_next_mark", "_past_runs", "_run_began", "_stride", "backward", "backward_sum", "began", "data", "data_sum", "device", "excluded",
        "first_iter", "forward", "forward_sum", "hooks", "hooks_sum", "iterations", "optimizer", "optimizer_sum",
        "total_sum",
    )  # fmt: skip

    def __init__(self) -> None:
        self.data = self.forward = self.backward = self.optimizer = self.hooks = 0.0
        self.data_sum = self.forward_sum = self.backward_sum = self.optimizer_sum = self.hooks_sum = 0.0
        self.total_sum = 0.0
        self.iterations = 0
        self.first_iter = 0  # the run's index of the first one
        self.excluded = 0.0
        self.began = 0.0  # the iteration, by `perf_counter` itself
        self._past_runs = self._run_began = 0.0
        self.device: DeviceClock | None = None
        self._marks: list[_Sums] = []  # each `_stride` iterations
        self._stride = self._next_mark = 1

    def begin_run(self, first_iter: int, device: DeviceClock | None) -> None:
        """A call of the trainer begins at an iteration; the clock goes on over several calls."""
        self.device = device
        self._run_began = perf_counter()
        if not self.iterations:
            self.first_iter = first_iter

    def end_run(self) -> None:
        """The call has ended."""
        self._past_runs, self._run_began = self.run_seconds, 0.0

    @property
    def run_seconds(self) -> float:
        """What the trainer's calls have taken so far, all of it."""
        return self._past_runs + (perf_counter() - self._run_began if self._run_began else 0.0)

    def begin(self) -> float:
        """An iteration begins, now."""
        self.data = self.backward = self.optimizer = self.hooks = 0.0
        self.began = perf_counter()
        return self.began - self.excluded

    @contextmanager
    def excluding(self) -> Iterator[None]:
        """Leave the time of the block, an evaluation, out of the iteration it may fall into."""
        before, began = self.excluded, perf_counter()
        try:
            yield
        finally:
            self.excluded = before + perf_counter() - began

    def commit(self, total: float) -> None:
        """Add the iteration, which took `total` seconds in all, evaluations left out, to the sums."""
        self.data_sum += self.data
        self.forward_sum += self.forward
        self.backward_sum += self.backward
        self.optimizer_sum += self.optimizer
        self.hooks_sum += self.hooks
        self.total_sum += total
        self.iterations += 1
        if self.iterations == self._next_mark:
            self._mark()

    @property
    def phases(self) -> Phases:
        """The sums so far."""
        return _phases(_NOTHING, self._sums())

    @property
    def trend(self) -> list[TrendPoint]:
        """The phases of equal stretches of iterations; the last one may be shorter."""
        marks, now = [_NOTHING, *self._marks], self._sums()
        if now[0] != marks[-1][0]:
            marks.append(now)
        return [
            TrendPoint(first_iter=self.first_iter + before[0], phases=_phases(before, mark))
            for before, mark in pairwise(marks)
        ]

    def _sums(self) -> _Sums:
        return (
            self.iterations, self.data_sum, self.forward_sum, self.backward_sum, self.optimizer_sum, self.hooks_sum,
            self.total_sum,
        )  # fmt: skip

    def _mark(self) -> None:
        # sums, and no record of phases, which takes 5 us: of the first iterations each is marked
        self._marks.append(self._sums())
        if len(self._marks) >= POINTS:
            self._marks = self._marks[1::2]
            self._stride *= 2
        self._next_mark = self.iterations + self._stride


def _phases(before: _Sums, after: _Sums) -> Phases:
    """What the iterations between two of them took."""
    iterations, total = after[0] - before[0], after[-1] - before[-1]
    data, forward, backward, optimizer, hooks = (
        b - a for a, b in zip(before[1:-1], after[1:-1], strict=True)
    )
    rest = total - (data + forward + backward + optimizer + hooks)
    return Phases(
        iterations=iterations, data=data, forward=forward, backward=backward, optimizer=optimizer, hooks=hooks,
        unaccounted=rest,
    )  # fmt: skip
