"""One recorded window of iterations: what is on the bus and on the clock meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from time import perf_counter
from typing import Protocol

from eventloop.bus import Bus
from eventloop.bus.recording import Recording
from eventloop.costs.records import Phases
from eventloop.costs.spans import SAVER, Span, SpanRecorder
from eventloop.costs.step_clock import (
    BACKWARD_BEGINS,
    BACKWARD_ENDS,
    FORWARD_BEGINS,
    FORWARD_ENDS,
    OPTIMIZER_ENDS,
    StepClock,
)
from eventloop.events import (
    AfterTest,
    AfterVal,
    BeforeSaveCheckpoint,
    BeforeTest,
    BeforeVal,
    CheckpointSaved,
    Event,
)
from eventloop.events.priority import Priority
from eventloop.tracing.file import WindowFacts

_ENDS = {
    FORWARD_ENDS: (FORWARD_BEGINS, "forward"),
    BACKWARD_ENDS: (BACKWARD_BEGINS, "backward"),
    OPTIMIZER_ENDS: (BACKWARD_ENDS, "optimizer"),
}
"""A mark that ends a phase: the one that began it, and the phase."""
_NOTED = (BeforeVal, AfterVal, BeforeTest, AfterTest, BeforeSaveCheckpoint, CheckpointSaved)


class TracedTrainer(Protocol):
    """The parts of a trainer that a window records."""

    bus: Bus
    clock: StepClock
    iter: int
    work_dir: Path
    rank: int
    world_size: int


class TracedPhases:
    """Stands in the place of the device's clock: the loop and the optimizer hook tell it where each phase begins and
    ends. What they tell it goes on to the clock whose place it takes.

    Args:
        ended: called at the end of each iteration, with its index.
    """

    def __init__(self, trainer: TracedTrainer, recorder: SpanRecorder, ended: Callable[[int], None]) -> None:
        self._trainer = trainer
        self._recorder = recorder
        self._ended = ended
        self.inner = trainer.clock.device
        self._iter = 0
        self._times: dict[int, float] = {}

    def begin(self, iterations: int) -> None:
        """The data is there, and before_train_iter over."""
        if self.inner is not None:
            self.inner.begin(iterations)
        clock, now = self._trainer.clock, perf_counter()
        self._iter = self._trainer.iter
        self._times = {FORWARD_BEGINS: now}
        skipped = clock.hooks > 0  # batches; the handlers that did it lie between the waits for the loader
        self._phase("data", clock.began, now if skipped else clock.began + clock.data)

    def mark(self, what: int) -> None:
        """The training thread has come to one of the marks."""
        if self.inner is not None:
            self.inner.mark(what)
        now = self._times[what] = perf_counter()
        begins, name = _ENDS.get(what, (what, ""))
        if name and begins in self._times:
            self._phase(name, self._times[begins], now)

    def end(self) -> None:
        """The iteration ends."""
        if self.inner is not None:
            self.inner.end()
        if not self._times:  # of the iteration in which the window was prepared
            return
        began = self._trainer.clock.began
        self._recorder.here("iteration", f"iteration {self._iter}", began, perf_counter() - began, self._iter)
        self._ended(self._iter)

    def _phase(self, name: str, began: float, ended: float) -> None:
        self._recorder.here("phase", name, began, ended - began, self._iter)

    @property
    def samples(self) -> int:
        """The device's clock's."""
        return 0 if self.inner is None else self.inner.samples

    @property
    def phases(self) -> Phases:
        """The device's clock's."""
        return Phases() if self.inner is None else self.inner.phases


class TraceWindow:
    """The window from iteration `first` up to, and without, iteration `end`, from now on.

    Args:
        over: called when its last iteration has ended.

    Raises:
        RuntimeError: another recorder is on the bus.
    """

    def __init__(
        self, trainer: TracedTrainer, first: int, end: int, limit: int, over: Callable[[], None]
    ) -> None:
        self._trainer, self._over = trainer, over
        self.extent = first, end
        self.recorder = SpanRecorder(limit)
        self.iterations = 0
        self.key = time.time_ns()
        self._saves: dict[str, float] = {}
        bus = trainer.bus
        self.recording: Recording = bus.record(self.recorder)
        self._subscription = bus.subscribe(self._note, *_NOTED, priority=Priority.HIGHEST)
        self._marks = TracedPhases(trainer, self.recorder, self._iteration_ended)
        trainer.clock.device = self._marks
        self._began = perf_counter()

    def leave(self) -> WindowFacts:
        """Take everything off the clock, and off the bus but for the recording; returns what the window was."""
        trainer, (first, end) = self._trainer, self.extent
        trainer.clock.device = self._marks.inner
        self._subscription.cancel()
        return WindowFacts(
            key=self.key, run=trainer.work_dir.name or str(trainer.work_dir), first_iter=first, iterations=self.iterations,
            complete=first + self.iterations >= end, began=self._began, ended=perf_counter(),
            thread=get_ident(), pid=os.getpid(), rank=trainer.rank, world_size=trainer.world_size,
        )  # fmt: skip

    def _iteration_ended(self, iteration: int) -> None:
        self.iterations += 1
        if iteration + 1 >= self.extent[1]:
            self._over()

    def _note(self, event: Event) -> None:
        """Has events emitted, which leave spans; of a save only its end says how long it took."""
        if isinstance(event, BeforeSaveCheckpoint):
            self._saves[event.path] = perf_counter()
        elif isinstance(event, CheckpointSaved):
            self._saved(event, perf_counter())

    def _saved(self, event: CheckpointSaved, now: float) -> None:
        began = self._saves.pop(event.path, now - event.seconds)  # of one begun before, its end is not known
        name, seconds = event.path.rsplit("/", 1)[-1], min(event.seconds, now - began)
        self.recorder.add(Span(SAVER, "save", name, began, seconds, event.iter, "checkpoint_saved"))
