"""Measure where the time of an iteration goes, on the training thread's clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from time import perf_counter
from typing import Literal, Protocol

from eventloop.costs.records import Phases, TrendPoint
from eventloop.costs.timing import Timing

POINTS = 512
"""Points that the trend holds at most. When there are more, every second point is dropped."""
FORWARD_BEGINS, FORWARD_ENDS, BACKWARD_BEGINS, BACKWARD_ENDS, OPTIMIZER_ENDS = range(5)
"""The marks that the loop and the optimizer hook set in each iteration."""

_Sums = tuple[int, float, float, float, float, float, float]
"""The number of iterations, the seconds of their five phases, and their wall time."""
_NOTHING: _Sums = (0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class PhaseMarks(Protocol):
    """A second clock for the phases of an iteration, such as a GPU's."""

    @property
    def samples(self) -> int:
        """Iterations that were measured."""

    @property
    def phases(self) -> Phases:
        """Sums over the measured iterations."""

    def begin(self, iterations: int) -> None:
        """Note that a forward pass begins, after `iterations` completed iterations."""

    def mark(self, what: int) -> None:
        """Note one of the marks, such as `FORWARD_ENDS`."""

    def end(self) -> None:
        """Note that the iteration ends."""


class StepClock:
    """Measure the phases of the current iteration in seconds, and sum them over the run.

    `data` is the wait for the loader and the move to the device, `forward` the train step (in a hand-written
    loop the whole body), `backward` and `optimizer` the work of the optimizer hook, `hooks` all other
    handlers of the iteration. The loop itself takes the rest of the wall time. Evaluations are left out:
    `excluded` is the time that they have taken so far, and `now` is a clock without it. On a GPU these are
    the times of the training thread, which runs ahead of the device; `device` measures the device.
    """

    def __init__(self) -> None:
        self.data = self.forward = self.backward = self.optimizer = self.hooks = 0.0
        self.iterations = 0
        self.first_iter = 0  # the run's index of the first iteration
        self.excluded = 0.0
        self.began = 0.0  # when the current iteration began, by `perf_counter` itself
        self.device: PhaseMarks | None = None
        self.times = Timing()
        """The wall times of the iterations."""
        self._data_sum = self._forward_sum = self._backward_sum = self._optimizer_sum = self._hooks_sum = 0.0
        self._total_sum = 0.0
        self._last_end = self._asked = self._loaded = self._forward_began = self._forward_ended = 0.0
        self._past_runs = self._run_began = 0.0
        self._in_step = False
        self._charged = self._charged_steps = (
            0.0  # of the body: to other phases, and to backward and optimizer
        )
        self._marks: list[_Sums] = []  # one every `_stride` iterations
        self._stride = self._next_mark = 1

    def begin_run(self, first_iter: int, device: PhaseMarks | None) -> None:
        """Begin a call of the trainer at iteration `first_iter`. Sums go on over several calls."""
        self.device = device
        self._run_began = perf_counter()
        if not self.iterations:
            self.first_iter = first_iter

    def end_run(self) -> None:
        """End the call."""
        self._past_runs, self._run_began = self.run_seconds, 0.0

    @property
    def run_seconds(self) -> float:
        """Seconds of all calls of the trainer so far, evaluations included."""
        return self._past_runs + (perf_counter() - self._run_began if self._run_began else 0.0)

    @contextmanager
    def excluding(self) -> Iterator[None]:
        """Leave the time of the block, an evaluation, out of the current iteration."""
        before, began = self.excluded, perf_counter()
        try:
            yield
        finally:
            self.excluded = before + perf_counter() - began

    # --- an iteration, in the order of the calls of the loop -----------------------------------------------

    def now(self) -> float:
        """Return the time in seconds, without evaluations."""
        return perf_counter() - self.excluded

    def begin_pass(self) -> None:
        """Begin a pass over the loader, with the wait for its first batch."""
        self.begin()
        self._last_end = self._asked

    def begin(self) -> None:
        """Begin an iteration with the wait for its batch."""
        self.data = self.backward = self.optimizer = self.hooks = 0.0
        self._charged = self._charged_steps = 0.0
        self.began = perf_counter()
        self._asked = self.began - self.excluded

    def begin_data(self) -> None:
        """Begin the wait for the batch here, after other work of a host, which counts as the loop's."""
        self._asked, self.data = self.now(), 0.0

    def end_data(self) -> None:
        """End the wait for the batch, which is on the device now."""
        self._loaded = self.now()
        self.data += self._loaded - self._asked

    def skip(self) -> None:
        """Charge the handlers that skipped the batch, and wait for the next batch."""
        self._asked = self.now()
        self.hooks += self._asked - self._loaded

    def begin_forward(self) -> None:
        """Begin the forward pass, after the handlers of `before_train_iter`."""
        if self.device is not None:
            self.device.begin(self.iterations)
        self._in_step = True
        self._forward_began = self.now()

    def end_forward(self) -> None:
        """End the step, or the body of a hand-written loop."""
        self._forward_ended = self.now()
        if self.device is not None:
            self.device.mark(FORWARD_ENDS)
        self._in_step = False
        self.forward = self._forward_ended - self._forward_began - self._charged

    def charge(self, phase: Literal["backward", "optimizer", "hooks"], seconds: float) -> None:
        """Count seconds of a part of another engine's iteration in its own phase.

        Otherwise `forward` would contain the part, or `data` if it runs between two steps.
        """
        if self._in_step:
            self._charged += seconds
            self._charged_steps += 0.0 if phase == "hooks" else seconds
        else:
            self.data -= seconds
        setattr(self, phase, getattr(self, phase) + seconds)

    def end(self) -> None:
        """End the iteration, after its handlers, and add it to the sums."""
        if self.device is not None:
            self.device.end()
        ended = self.now()
        handlers = (self._forward_began - self._loaded) + (ended - self._forward_ended)
        self.hooks += handlers - (self.backward + self.optimizer - self._charged_steps)
        self._add(ended - self._last_end)
        self._last_end = ended

    @property
    def phases(self) -> Phases:
        """Sums so far."""
        return _phases(_NOTHING, self._sums())

    @property
    def trend(self) -> list[TrendPoint]:
        """Phases of equal numbers of iterations; the last point may have fewer."""
        marks, now = [_NOTHING, *self._marks], self._sums()
        if now[0] != marks[-1][0]:
            marks.append(now)
        return [
            TrendPoint(first_iter=self.first_iter + before[0], phases=_phases(before, mark))
            for before, mark in pairwise(marks)
        ]

    def _add(self, total: float) -> None:
        """Add the current iteration, which took `total` seconds, to the sums."""
        self._data_sum += self.data
        self._forward_sum += self.forward
        self._backward_sum += self.backward
        self._optimizer_sum += self.optimizer
        self._hooks_sum += self.hooks
        self._total_sum += total
        self.times.add(total)
        self.iterations += 1
        if self.iterations == self._next_mark:
            self._mark()

    def _sums(self) -> _Sums:
        return (
            self.iterations, self._data_sum, self._forward_sum, self._backward_sum, self._optimizer_sum,
            self._hooks_sum, self._total_sum,
        )  # fmt: skip

    def _mark(self) -> None:
        # Sums rather than a record of phases, which takes 5 us: each of the first iterations is marked.
        self._marks.append(self._sums())
        if len(self._marks) >= POINTS:
            self._marks = self._marks[1::2]
            self._stride *= 2
        self._next_mark = self.iterations + self._stride


def _phases(before: _Sums, after: _Sums) -> Phases:
    """Return the phases of the iterations between two sums."""
    iterations, total = after[0] - before[0], after[-1] - before[-1]
    data, forward, backward, optimizer, hooks = (
        b - a for a, b in zip(before[1:-1], after[1:-1], strict=True)
    )
    rest = total - (data + forward + backward + optimizer + hooks)
    return Phases(
        iterations=iterations, data=data, forward=forward, backward=backward, optimizer=optimizer,
        hooks=hooks, unaccounted=rest,
    )  # fmt: skip
