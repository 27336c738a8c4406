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
"""The metrics that `IterTimerHook` logs for each iteration, in seconds. "time" is the sum of the others."""
POINTS = 512
"""The number of points in the run's trend at which every second point is dropped."""
FORWARD_BEGINS, FORWARD_ENDS, BACKWARD_BEGINS, BACKWARD_ENDS, OPTIMIZER_ENDS = range(5)
"""The moments of an iteration that the loop and the optimizer hook report to a clock of the device."""

Sums = tuple[int, float, float, float, float, float, float, float, float, float]
"""The number of iterations, the seconds of five phases and of three waits, and the wall time."""
NOTHING: Sums = (0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
SUMMED = (*PHASES[:-1], *WAITS)
"""The names of the phases and waits in `Sums`, in their order there."""


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
        """Record the time of a moment of the iteration, such as `FORWARD_ENDS`."""

    def end(self) -> None:
        """Record that the iteration ends."""


class StepClock:
    """Measure the phases of the current iteration in seconds, and sum them over the run.

    `data` is the wait for the loader and the move to the device, `forward` the train step (in a hand-written
    loop the whole body), `backward` and `optimizer` the work of the optimizer hook, and `hooks` all other
    handlers of the iteration. The rest of the wall time is the loop itself.

    Evaluations do not count: `evaluations` is their time so far, and `now` is a clock that stops during them.
    The wall time of an iteration includes waits, and the phases do not. Code that measures a part of a phase
    subtracts `excluded`, the time of evaluations and waits so far. On a GPU these are the times of the
    training thread, which runs ahead of the device; `device` measures the device.
    """

    def __init__(self) -> None:
        self.data = self.forward = self.backward = self.optimizer = self.hooks = 0.0
        self.iterations = 0
        self.first_iter = 0  # the index of the first measured iteration in the run
        self.excluded = self.evaluations = 0.0
        self.paused = 0.0
        """The seconds for which a command has paused the run. They are contained in `evaluations`."""
        self.waits = Waits()
        self.began = 0.0  # the time at which the current iteration began, by `perf_counter`
        self.device: PhaseMarks | None = None
        self.handlers: HandlerTrend | None = None
        """The seconds of each handler over the course of the run; None before the first run."""
        self.times = Timing()
        """The wall times of the iterations."""
        self._data_sum = self._forward_sum = self._backward_sum = self._optimizer_sum = self._hooks_sum = 0.0
        self._total_sum = 0.0
        self._waited_sums = dict.fromkeys(WAITS, 0.0)  # only waits within iterations
        # the seconds of waits since iteration number `_waits_after`; `_total_sum` does not include them yet
        self._latest_waits, self._waits_after = 0.0, 0
        self._last_end = self._requested_at = self._loaded = self._forward_began = self._forward_ended = 0.0
        self._past_runs = self._run_began = 0.0
        self._in_step = False  # whether the train step, or the body of a hand-written loop, is under way
        # the seconds of the train step that `charge` has moved to any phase, and to backward or optimizer
        self._charged = self._charged_steps = 0.0
        self._marks: list[Sums] = []  # the sums after every `_stride` iterations
        self._stride = self._next_mark = 1

    def begin_run(self, first_iter: int, device: PhaseMarks | None, signal_of: SignalOf) -> None:
        """Begin to measure a run, which is a call such as `train`; the sums of earlier runs are kept.

        Args:
            first_iter: the index of the first iteration; later runs do not change it.
            device: a clock that measures the phases on the device as well, or None.
            signal_of: returns an object with the handlers of an event, such as `Bus.signal`.
        """
        self.device = device
        self.handlers = self.handlers or HandlerTrend(signal_of)
        self._run_began = perf_counter()
        self.waits.place = "between"
        self.waits.begin(self)
        if not self.iterations:
            self.first_iter = first_iter

    def end_run(self) -> None:
        """End the run that `begin_run` began; no wait is counted until the next run."""
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
        excluded, evaluations, began = self.excluded, self.evaluations, perf_counter()
        place, self.waits.place = self.waits.place, "evaluations"
        try:
            yield
        finally:
            seconds = perf_counter() - began
            self.excluded, self.evaluations = excluded + seconds, evaluations + seconds
            self.waits.place = place

    def exclude(self, seconds: float) -> None:
        """Exclude the last `seconds`, in which an evaluation ran, from the current iteration."""
        self.excluded += seconds
        self.evaluations += seconds

    @property
    def evaluation_seconds(self) -> float:
        """Return the seconds of all evaluations so far, without the waits in them, and without pauses."""
        waits = sum(wait.seconds for wait in self.waits.records() if wait.place == "evaluations")
        return self.evaluations - self.paused - waits

    def waited(self, wait: Wait) -> None:
        """Count a wait that has just ended, and exclude it from the phase in which it was spent."""
        self.waits.add(wait)
        if self.waits.place != "iterations":
            return
        self._waited_sums[wait.cause] += wait.seconds
        self.excluded += wait.seconds
        # as `excluded` has grown, the end of this iteration comes out earlier by the wait. The last end moves
        # back as well, so that the wall time, their difference, still includes the wait
        self._last_end -= wait.seconds
        if self._waits_after != self.iterations:
            self._latest_waits, self._waits_after = 0.0, self.iterations
        self._latest_waits += wait.seconds

    # --- an iteration, in the order of the calls of the loop -----------------------------------------------

    def now(self) -> float:
        """Return the time in seconds, without evaluations."""
        return perf_counter() - self.evaluations

    def begin_pass(self) -> None:
        """Begin a pass over the loader, and its first iteration with the wait for the first batch."""
        self.end_pass()
        self.waits.place = "iterations"
        self.begin()
        self._last_end = self._requested_at

    def end_pass(self, place: Literal["between", "end"] = "between") -> None:
        """End the pass over the loader: no iteration is under way until the next pass begins.

        Args:
            place: the part of the run that begins: "between" two passes, or the "end".
        """
        if self._waits_after == self.iterations:  # waits after the last iteration, which no other will add
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
        """Begin the wait for the batch later than `begin`; the time between them counts as the loop's own."""
        self._requested_at, self.data = perf_counter() - self.excluded, 0.0

    def end_data(self) -> None:
        """End the wait for the batch, which is on the device now."""
        # this difference is written out everywhere, because a method would cost a call (`benchmarks.bridges`)
        self._loaded = perf_counter() - self.excluded
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
        """Move seconds of the current iteration to a phase.

        They are taken out of `forward` during the train step, else out of `data`. This serves bridges, which
        measure the callbacks of another engine, and iterations of several batches, whose backward passes run
        between the first forward pass and the last one.
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
        # handlers run before and after the train step; the optimizer hook's work counts as other phases
        in_handlers = (self._forward_began - self._loaded) + (ended - self._forward_ended)
        self.hooks += in_handlers - (self.backward + self.optimizer - self._charged_steps)
        self._add(ended - self._last_end)
        self._last_end = ended

    @property
    def phases(self) -> Phases:
        """Return the phases, summed over all iterations so far."""
        return phases_between(NOTHING, self.sums())

    @property
    def trend(self) -> list[TrendPoint]:
        """Return the phases in successive parts of the run of equally many iterations, the last of fewer."""
        marks, now = [NOTHING, *self._marks], self.sums()
        if _iterations(now) != _iterations(marks[-1]):
            marks.append(now)
        return [
            TrendPoint(first_iter=self.first_iter + _iterations(before), phases=phases_between(before, after))
            for before, after in pairwise(marks)
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
        """Return the sums so far as a tuple, which is cheaper to make than a `Phases`."""
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
        """Record the sums so far as the end of a point of the trend."""
        # not as a `Phases`, which takes 5 us: at the begin of a run each iteration ends a point
        self._marks.append(self.sums())
        if len(self._marks) >= POINTS:
            self._marks = self._marks[1::2]
            self._stride *= 2
        self._next_mark = self.iterations + self._stride
        if self.handlers is not None:
            self.handlers.mark(self.iterations)


def _iterations(sums: Sums) -> int:
    return sums[0]


def phases_between(before: Sums, after: Sums) -> Phases:
    """Return the phases of the iterations between two sums, rounded to a nanosecond for a small file."""
    _, *seconds_before, wall_before = before
    _, *seconds_after, wall_after = after
    differences = [later - earlier for earlier, later in zip(seconds_before, seconds_after, strict=True)]
    seconds = {name: round(difference, 9) for name, difference in zip(SUMMED, differences, strict=True)}
    unaccounted = round(wall_after - wall_before - sum(differences), 9)
    return Phases(iterations=_iterations(after) - _iterations(before), unaccounted=unaccounted, **seconds)
