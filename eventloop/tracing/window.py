"""Record one window of iterations: everything that happens on the bus, and the phases of each iteration.

`TraceHook` opens a window, and writes the result with `eventloop.tracing.files`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from threading import get_ident
from time import perf_counter

from eventloop.bus.recording import Recording
from eventloop.costs.records import WAITING, Phases
from eventloop.costs.spans import SAVER, Span, SpanRecorder
from eventloop.costs.step_clock import (
    BACKWARD_BEGINS,
    BACKWARD_ENDS,
    FORWARD_BEGINS,
    FORWARD_ENDS,
    OPTIMIZER_ENDS,
)
from eventloop.costs.waits import Wait
from eventloop.data.trainer_parts import TrainerParts
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
from eventloop.tracing.chrome import WindowFacts

_ENDS = {
    FORWARD_ENDS: (FORWARD_BEGINS, "forward"),
    BACKWARD_ENDS: (BACKWARD_BEGINS, "backward"),
    OPTIMIZER_ENDS: (BACKWARD_ENDS, "optimizer"),
}
"""For each mark that ends a phase: the mark at which the phase begins, and the name of the phase."""
_RECORDED = (BeforeVal, AfterVal, BeforeTest, AfterTest, BeforeSaveCheckpoint, CheckpointSaved)


class TracedPhases:
    """Record the phases of each iteration, in place of the trainer's device clock.

    The loop and the optimizer hook report the begin and end of each phase to the device clock. This object
    takes its place, records the times, and passes the calls on to the device clock.

    Args:
        ended: called at the end of each iteration with the iteration's number.
    """

    def __init__(self, trainer: TrainerParts, recorder: SpanRecorder, ended: Callable[[int], None]) -> None:
        self._trainer = trainer
        self._recorder = recorder
        self._ended = ended
        self.inner = trainer.clock.device
        self._iter = 0
        self._times: dict[int, float] = {}

    def begin(self, iterations: int) -> None:
        """Record the data phase, and the time at which the forward phase begins.

        The step clock calls it after `before_train_iter`.

        Args:
            iterations: the completed iterations, which the device clock gets.
        """
        if self.inner is not None:
            self.inner.begin(iterations)
        clock, now = self._trainer.clock, perf_counter()
        self._iter = self._trainer.iter
        self._times = {FORWARD_BEGINS: now}
        skipped = clock.hooks > 0  # batches were skipped: their handlers ran between the waits for data
        self._phase("data", clock.began, now if skipped else clock.began + clock.data)

    def mark(self, what: int) -> None:
        """Record the time of a mark such as FORWARD_ENDS, and record the phase that the mark ends."""
        if self.inner is not None:
            self.inner.mark(what)
        now = self._times[what] = perf_counter()
        begins, name = _ENDS.get(what, (what, ""))
        if name and begins in self._times:
            self._phase(name, self._times[begins], now)

    def end(self) -> None:
        """Record the iteration, and call `ended`.

        Nothing is recorded for the iteration in which this object was made.
        """
        if self.inner is not None:
            self.inner.end()
        if not self._times:  # the window was prepared within this iteration
            return
        began = self._trainer.clock.began
        self._recorder.here("iteration", f"iteration {self._iter}", began, perf_counter() - began, self._iter)
        self._ended(self._iter)

    def _phase(self, name: str, began: float, ended: float) -> None:
        self._recorder.here("phase", name, began, ended - began, self._iter)

    @property
    def samples(self) -> int:
        """Return the number of iterations that the replaced device clock measured."""
        return 0 if self.inner is None else self.inner.samples

    @property
    def phases(self) -> Phases:
        """Return the phase times that the replaced device clock measured."""
        return Phases() if self.inner is None else self.inner.phases


class TraceWindow:
    """A recording from the creation of this object to the end of iteration `end - 1`.

    Args:
        first: the number of the first iteration in the window, which is the next one to begin.
        end: the number of the iteration after the last one in the window.
        limit: the largest number of spans, and of queue lengths, to record.
        over: called when the last iteration of the window has ended.

    Raises:
        RuntimeError: another recorder is on the bus.
    """

    def __init__(
        self, trainer: TrainerParts, first: int, end: int, limit: int, over: Callable[[], None]
    ) -> None:
        self._trainer, self._over = trainer, over
        self.extent = first, end
        self.recorder = SpanRecorder(limit)
        self.iterations = 0
        self._saves: dict[str, float] = {}
        bus = trainer.bus
        self.recording: Recording = bus.record(self.recorder)
        self._subscription = bus.subscribe(
            self._record_save, *bus.possible(_RECORDED), priority=Priority.HIGHEST
        )
        trainer.clock.waits.watchers.append(self._waited)
        self._marks = TracedPhases(trainer, self.recorder, self._iteration_ended)
        trainer.clock.device = self._marks
        self._began, self._began_unix = perf_counter(), time.time()

    def close(self) -> WindowFacts:
        """Restore the trainer's clock, cancel the subscription, and return the facts of the window.

        The recorder stays on the bus, so that background subscribers can finish; `recording` removes it
        later.
        """
        trainer, (first, end) = self._trainer, self.extent
        trainer.clock.device = self._marks.inner
        trainer.clock.waits.watchers.remove(self._waited)
        self._subscription.cancel()
        name = trainer.work_dir.name or str(trainer.work_dir)
        return WindowFacts(
            run=name.encode(errors="replace").decode(),  # the name of a folder need not be UTF-8
            first_iter=first,
            iterations=self.iterations,
            complete=first + self.iterations >= end,
            began=self._began,
            began_unix=self._began_unix,
            thread=get_ident(),
            pid=os.getpid(),
            rank=trainer.rank,
            world_size=trainer.world_size,
        )

    def _iteration_ended(self, iteration: int) -> None:
        self.iterations += 1
        if iteration + 1 >= self.extent[1]:
            self._over()

    def _waited(self, wait: Wait) -> None:
        """Record a span of a wait that has just ended, within those of the handlers that waited."""
        name, iteration = WAITING[wait.cause], self._trainer.iter
        self.recorder.here("wait", name, wait.began, wait.seconds, iteration, event=wait.name)

    def _record_save(self, event: Event) -> None:
        """Store when a checkpoint save begins, and record a span of the save when it ends.

        The subscription itself makes the trainer emit the other events of `_RECORDED`, and so records
        their spans, too.
        """
        if isinstance(event, BeforeSaveCheckpoint):
            self._saves[event.path] = perf_counter()
        elif isinstance(event, CheckpointSaved):
            self._saved(event, perf_counter())

    def _saved(self, event: CheckpointSaved, now: float) -> None:
        began = self._saves.pop(event.path, now - event.seconds)  # a save begun before the window has no note
        name, seconds = event.path.rsplit("/", 1)[-1], min(event.seconds, now - began)
        self.recorder.add(Span(SAVER, "save", name, began, seconds, event.iter, "checkpoint_saved"))
