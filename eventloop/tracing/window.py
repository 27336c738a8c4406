"""Record one window of iterations: the spans of the bus, the phases of each iteration, waits and saves.

`TraceHook` creates a `TraceWindow`, and writes the result with `eventloop.tracing.files`.
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
"""For each mark of the step clock that ends a phase: the mark that begins the phase, and the phase's name."""
_RECORDED = (BeforeVal, AfterVal, BeforeTest, AfterTest, BeforeSaveCheckpoint, CheckpointSaved)
"""The events that are recorded even if nothing else subscribes to them."""


class TracedPhases:
    """Record the phases of each iteration, as a proxy of the trainer's device clock.

    The loop and the optimizer hook report the begin and end of each phase to the device clock. This object
    replaces the device clock as `trainer.clock.device`, records the times, and calls the replaced clock.

    Args:
        trainer: the trainer.
        recorder: receives the spans.
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

        The step clock calls this after `before_train_iter`.

        Args:
            iterations: the number of completed iterations, for the device clock.
        """
        if self.inner is not None:
            self.inner.begin(iterations)
        clock, now = self._trainer.clock, perf_counter()
        self._iter = self._trainer.iter
        self._times = {FORWARD_BEGINS: now}
        # if batches were skipped, handlers ran between the waits for data; one span then covers all of them
        has_skipped = clock.hooks > 0
        self._phase("data", clock.began, now if has_skipped else clock.began + clock.data)

    def mark(self, kind: int) -> None:
        """Record the time of a mark, and the phase that the mark ends.

        Args:
            kind: the mark, such as FORWARD_ENDS.
        """
        if self.inner is not None:
            self.inner.mark(kind)
        now = self._times[kind] = perf_counter()
        begin_kind, name = _ENDS.get(kind, (kind, ""))
        if name and begin_kind in self._times:
            self._phase(name, self._times[begin_kind], now)

    def end(self) -> None:
        """Record the iteration, and call `ended`; do nothing in the iteration in which recording began."""
        if self.inner is not None:
            self.inner.end()
        if not self._times:
            return
        began = self._trainer.clock.began
        self._recorder.here("iteration", f"iteration {self._iter}", began, perf_counter() - began, self._iter)
        self._ended(self._iter)

    def _phase(self, name: str, began: float, ended: float) -> None:
        """Record the span of a phase."""
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
    """Record a window of iterations, from the creation of this object on.

    Args:
        trainer: the trainer.
        first: the number of the window's first iteration, which is the next one to begin.
        end: the number of the iteration after the window's last one.
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
        """The number of the window's first iteration, and of the iteration after the last one."""
        self.recorder = SpanRecorder(limit)
        self.iterations = 0
        """The number of completed iterations of the window."""
        self._save_begins: dict[str, float] = {}  # by path, the `perf_counter` at the begin of a save
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
        """Stop recording the training thread, and return the facts of the window.

        The recorder still records deliveries to background subscribers until the caller ends `recording`.
        """
        trainer, (first, end) = self._trainer, self.extent
        trainer.clock.device = self._marks.inner
        trainer.clock.waits.watchers.remove(self._waited)
        self._subscription.cancel()
        name = trainer.work_dir.name or str(trainer.work_dir)
        return WindowFacts(
            run=name.encode(errors="replace").decode(),  # "?" for lone surrogates, which JSON does not allow
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
        """Count a completed iteration, and call `over` after the window's last one."""
        self.iterations += 1
        if iteration + 1 >= self.extent[1]:
            self._over()

    def _waited(self, wait: Wait) -> None:
        """Record the span of a wait that has just ended."""
        name, iteration = WAITING[wait.cause], self._trainer.iter
        self.recorder.here("wait", name, wait.began, wait.seconds, iteration, event=wait.name)

    def _record_save(self, event: Event) -> None:
        """Store when a checkpoint save begins, and record the span of the save when it ends.

        Other events of `_RECORDED` are ignored here: the bus records the spans of all events that have a
        subscriber.
        """
        if isinstance(event, BeforeSaveCheckpoint):
            self._save_begins[event.path] = perf_counter()
        elif isinstance(event, CheckpointSaved):
            self._add_save(event, perf_counter())

    def _add_save(self, event: CheckpointSaved, now: float) -> None:
        """Record the span of a save that has ended.

        The begin of a save that began before the window is computed from its duration.
        """
        began = self._save_begins.pop(event.path, now - event.seconds)
        name, seconds = event.path.rsplit("/", 1)[-1], min(event.seconds, now - began)
        self.recorder.add(Span(SAVER, "save", name, began, seconds, event.iter, "checkpoint_saved"))
