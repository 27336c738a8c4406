"""Measure the phases of each training iteration on the training thread's clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from time import perf_counter
from typing import Literal, Protocol

from eventloop.costs.handler_trend import HandlerTrend, SignalOf
from eventloop.costs.records import PHASES, WAITS, Phases, TrendPoint
from eventloop.costs.timing import Timing
from eventloop.costs.waits import Wait, Waits

TIMES = ("time", "data_time", "step_time", "hook_time")
"""The metrics of a training that IterTimerHook records, in seconds: the first is the sum of the others."""
POINTS = 512
"""The largest number of points in the trend; when it is reached, every second one is dropped."""
FORWARD_BEGINS, FORWARD_ENDS, BACKWARD_BEGINS, BACKWARD_ENDS, OPTIMIZER_ENDS = range(5)
"""The marks that the loop and the optimizer hook set in each iteration."""

Sums = tuple[int, float, float, float, float, float, float, float, float, float]
"""The number of iterations, the seconds of five phases and of three waits, and the wall time."""
NOTHING: Sums = (0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
SUMMED = (*PHASES[:-1], *WAITS)
"""The names of the phases and waits in `Sums`, in their order."""


class PhaseMarks(Protocol):
    """A second clock for the phases of an iteration, such as a GPU's."""

    @property
    def samples(self) -> int:
        """The number of measured iterations."""

    @property
    def phases(self) -> Phases:
        """The phases, summed over the measured iterations."""

    def begin(self, iterations: int) -> None:
        """Record that a forward pass begins, after `iterations` completed iterations."""

    def mark(self, what: int) -> None:
        """Record one of the marks, such as `FORWARD_ENDS`."""

    def end(self) -> None:
        """Record that the iteration ends."""


class StepClock:
    """Measure the phases of the current iteration in seconds, and sum them over the run.

    `data` is the wait for the loader and the move to the device, `forward` the train step (in a hand-written
    loop the whole body), `backward` and `optimizer` the work of the optimizer hook, and `hooks` all other
    handlers of the iteration. The rest of the wall time is the loop itself. Evaluations do not count:
    `evaluations` is their time so far, and `now` is a clock that stands still during them. Waits are in the
    wall time of an iteration, and in none of these phases: code that measures a part of a phase subtracts
    `excluded`, the time of evaluations and waits so far. On a GPU these are the times of the training thread,
    which runs ahead of the device; `device` measures the device.
    """

    def __init__(self) -> None:
        self.data = self.forward = self.backward = self.optimizer = self.hooks = 0.0
        self.iterations = 0
        self.first_iter = 0  # the run's index of the first iteration
        self.excluded = self.evaluations = 0.0
        self.paused = 0.0
        """The seconds of `evaluations` for which a command has paused the run."""
        self.waits = Waits()
        self.began = 0.0  # when the current iteration began, by `perf_counter` itself
        self.device: PhaseMarks | None = None
        self.handlers: HandlerTrend | None = None
        """The trend of the handlers, created at the first run."""
        self.times = Timing()
        """The wall times of the iterations."""
        self._data_sum = self._forward_sum = self._backward_sum = self._optimizer_sum = self._hooks_sum = 0.0
        self._total_sum = 0.0
        self._waited_sums = dict.fromkeys(WAITS, 0.0)  # in iterations
        # seconds of waits since the end of iteration number `_waits_after`, which are not in `_total_sum` yet
        self._latest_waits, self._waits_after = 0.0, 0
        self._last_end = self._requested_at = self._loaded = self._forward_began = self._forward_ended = 0.0
        self._past_runs = self._run_began = 0.0
        self._in_step = False
        # seconds of the step's body that count in other phases, and those of backward and optimizer alone
        self._charged = self._charged_steps = 0.0
        self._marks: list[Sums] = []  # one every `_stride` iterations
        self._stride = self._next_mark = 1

    def begin_run(self, first_iter: int, device: PhaseMarks | None, signal_of: SignalOf) -> None:
        """Begin to measure a run, which is a call such as `train`; the sums of earlier runs are kept.

        Args:
            first_iter: the index of the first iteration; later runs do not change it.
            device: a clock that measures the phases on the device as well, or None.
            signal_of: returns the signal of an event, whose handlers' times are recorded over the run.
        """
        self.device = device
        self.handlers = self.handlers or HandlerTrend(signal_of)
        self._run_began = perf_counter()
        self.waits.place = "between"
        self.waits.begin(self)
        if not self.iterations:
            self.first_iter = first_iter

    def end_run(self) -> None:
        """End the measurement that `begin_run` began."""
        self._past_runs, self._run_began = self.run_seconds, 0.0
        self.waits.end(self)
        self.waits.place = "between"

    @property
    def run_seconds(self) -> float:
        """Return the seconds of all runs so far, evaluations included."""
        return self._past_runs + (perf_counter() - self._run_began if self._run_began else 0.0)

    @contextmanager
    def excluding(self) -> Iterator[None]:
        """Exclude the time of the block, an evaluation, from the current iteration."""
        before, began = (self.excluded, self.evaluations), perf_counter()
        place, self.waits.place = self.waits.place, "evaluations"
        try:
            yield
        finally:
            seconds = perf_counter() - began
            self.excluded, self.evaluations = before[0] + seconds, before[1] + seconds
            self.waits.place = place

    def exclude(self, seconds: float) -> None:
        """Exclude seconds of an evaluation that have passed from the current iteration."""
        self.excluded += seconds
        self.evaluations += seconds

    @property
    def evaluation_seconds(self) -> float:
        """Return the seconds of all evaluations so far, without the waits in them, and without pauses."""
        waits = sum(w.seconds for w in self.waits.records() if w.place == "evaluations")
        return self.evaluations - self.paused - waits

    def waited(self, wait: Wait) -> None:
        """Count a wait that has just ended, and take it out of the phase in which it was spent."""
        self.waits.add(wait)
        if self.waits.place != "iterations":
            return
        self._waited_sums[wait.cause] += wait.seconds
        self.excluded += wait.seconds
        self._last_end -= wait.seconds  # so that the iteration's wall time includes the wait
        if self._waits_after != self.iterations:
            self._latest_waits, self._waits_after = 0.0, self.iterations
        self._latest_waits += wait.seconds

    # --- an iteration, in the order of the calls of the loop -----------------------------------------------

    def now(self) -> float:
        """Return the time in seconds, without evaluations."""
        return perf_counter() - self.evaluations

    def begin_pass(self) -> None:
        """Begin a pass over the loader: its first iteration begins with the wait for the first batch."""
        self.end_pass()
        self.waits.place = "iterations"
        self.begin()
        self._last_end = self._requested_at

    def end_pass(self, place: Literal["between", "end"] = "between") -> None:
        """End the pass over the loader: no iteration is under way until the next pass begins.

        Args:
            place: the part of the run that begins.
        """
        if self._waits_after == self.iterations:  # no iteration will end that has these waits
            self._total_sum += self._latest_waits
            self._latest_waits = 0.0
        self.waits.place = place

    def begin(self) -> None:
        """Begin an iteration with the wait for its batch."""
        self.data = self.backward = self.optimizer = self.hooks = 0.0
        self._charged = self._charged_steps = 0.0
        self.began = perf_counter()
        self._requested_at = self.began - self.excluded

    def begin_data(self) -> None:
        """Begin the wait for the batch only now; the time since `begin` then counts as the loop's."""
        self._requested_at, self.data = perf_counter() - self.excluded, 0.0

    def end_data(self) -> None:
        """End the wait for the batch, which is on the device now."""
        self._loaded = perf_counter() - self.excluded  # no call, as below (`benchmarks.bridges`)
        self.data += self._loaded - self._requested_at

    def skip(self) -> None:
        """Count the time of handlers that skipped the batch as hooks; begin the wait for the next batch."""
        self._requested_at = perf_counter() - self.excluded
        self.hooks += self._requested_at - self._loaded

    def begin_forward(self) -> None:
        """Begin the forward pass, after the handlers of `before_train_iter`."""
        if self.device is not None:
            self.device.begin(self.iterations)
        self._in_step = True
        self._forward_began = perf_counter() - self.excluded

    def end_forward(self) -> None:
        """End the forward phase: the train step, or the body of a hand-written loop, has returned."""
        self._forward_ended = perf_counter() - self.excluded
        if self.device is not None:
            self.device.mark(FORWARD_ENDS)
        self._in_step = False
        self.forward = self._forward_ended - self._forward_began - self._charged

    def charge(self, phase: Literal["data", "backward", "optimizer", "hooks"], seconds: float) -> None:
        """Add seconds to a phase of the current iteration of another engine, and take them from the loop's.

        They are taken out of `forward` during a step, else out of `data`. An iteration of several batches
        charges the phases between its first forward pass and its last one.
        """
        if self._in_step:
            self._charged += seconds
            self._charged_steps += seconds if phase in ("backward", "optimizer") else 0.0
        else:
            self.data -= seconds
        if phase == "data":
            self.data += seconds
        elif phase == "hooks":
            self.hooks += seconds
        elif phase == "backward":
            self.backward += seconds
        else:
            self.optimizer += seconds

    def end(self) -> None:
        """End the iteration, after its handlers, and add it to the sums."""
        if self.device is not None:
            self.device.end()
        ended = perf_counter() - self.excluded
        handlers = (self._forward_began - self._loaded) + (ended - self._forward_ended)
        self.hooks += handlers - (self.backward + self.optimizer - self._charged_steps)
        self._add(ended - self._last_end)
        self._last_end = ended

    @property
    def phases(self) -> Phases:
        """Return the phases, summed over all iterations so far."""
        return phases_between(NOTHING, self.sums())

    @property
    def trend(self) -> list[TrendPoint]:
        """Return the points of the trend, of equally many iterations each; the last point may have fewer."""
        marks, now = [NOTHING, *self._marks], self.sums()
        if now[0] != marks[-1][0]:
            marks.append(now)
        return [
            TrendPoint(first_iter=self.first_iter + before[0], phases=phases_between(before, mark))
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

    def sums(self) -> Sums:
        """Return the sums so far as plain numbers, which is cheaper than a `Phases`."""
        latest = self._latest_waits if self._waits_after == self.iterations else 0.0
        checkpoint, background, ranks = self._waited_sums.values()
        return (
            self.iterations,
            self._data_sum,
            self._forward_sum,
            self._backward_sum,
            self._optimizer_sum,
            self._hooks_sum,
            checkpoint,
            background,
            ranks,
            self._total_sum + latest,
        )

    def _mark(self) -> None:
        # Sums rather than a record of phases, which takes 5 us: each of the first iterations is marked.
        self._marks.append(self.sums())
        if len(self._marks) >= POINTS:
            self._marks = self._marks[1::2]
            self._stride *= 2
        self._next_mark = self.iterations + self._stride
        if self.handlers is not None:
            self.handlers.mark(self.iterations)


def phases_between(before: Sums, after: Sums) -> Phases:
    """Return the phases of the iterations between two sums, rounded to a nanosecond for a small file."""
    iterations, total = after[0] - before[0], after[-1] - before[-1]
    parts = [b - a for a, b in zip(before[1:-1], after[1:-1], strict=True)]
    seconds = {name: round(each, 9) for name, each in zip(SUMMED, parts, strict=True)}
    return Phases(iterations=iterations, unaccounted=round(total - sum(parts), 9), **seconds)
