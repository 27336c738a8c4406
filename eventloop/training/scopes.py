"""Define context managers that emit the events at the begin and end of a run, an epoch or an evaluation.

The closing event is emitted even if the body raises an error. The error propagates, and an error of a handler
of the closing event is added to it as a note. If a hand-written loop is left by `break`, `return` or an
exception of its own, the reason in the closing event is "left"; if a handler raised an error, it is "error".

The end of a run takes time: checkpoints become durable, and writers receive their events. After a
KeyboardInterrupt during the end of a run everything is closed without waiting.
"""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from eventloop.eventlog.undelivered import store_undelivered
from eventloop.events import (
    COMPLETED,
    AfterPredict,
    AfterRun,
    AfterTest,
    AfterTestEpoch,
    AfterTrain,
    AfterTrainEpoch,
    AfterVal,
    AfterValEpoch,
    BeforePredict,
    BeforeRun,
    BeforeTest,
    BeforeTestEpoch,
    BeforeTrain,
    BeforeTrainEpoch,
    BeforeVal,
    BeforeValEpoch,
    Event,
)
from eventloop.metrics.current import exit_run
from eventloop.metrics.storage import ENTERED, EventStorage
from eventloop.ownership.status import Outcome
from eventloop.state.undo import Undo
from eventloop.stops.ending import ERROR, LEFT, drain, ends_at_once, log_rest
from eventloop.training.protocols import LoopTrainer
from eventloop.util.text import error_text

logger = logging.getLogger("eventloop")


class Scope:
    """A context manager that emits one event on entry and one on exit."""

    def __init__(self, trainer: LoopTrainer) -> None:
        self.trainer = trainer
        self.metrics: dict[str, float] = {}
        self.reason = COMPLETED
        """The reason of the closing event if the body reaches its end."""
        self.complete = False
        """True once the body has done all its work, even if a stop was requested meanwhile."""

    def begin(self) -> None:
        """Emit the opening event."""
        raise NotImplementedError

    def end(self, reason: str, error: BaseException | None) -> None:
        """Emit the closing event."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Begin the scope; an error of a handler ends it at once, because others have seen it begin."""
        try:
            self.begin()
        except BaseException as error:
            # some handlers may have received the opening event, and need the closing one
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Emit the closing event with the reason of the end, and keep the error that ended the run."""
        trainer, loop_left = self.trainer, isinstance(error, GeneratorExit)
        if error is not None and not loop_left:
            trainer.failure = error
        failure = trainer.failure if error is not None else None  # None if only the loop was left
        if ends_at_once(trainer):
            trainer.bus.never_wait()
        reason = self.reason if self.complete else trainer.stop_reason or COMPLETED
        if error is not None:
            reason = LEFT if failure is None else ERROR
        try:
            self.end(reason, failure)
        except Exception as closing:
            if error is None:
                trainer.failure = closing
                raise
            if loop_left:  # the interpreter would ignore an error raised while a generator is closed
                logger.exception("a handler failed while a hand-written loop was being left")
            else:
                error.add_note("while closing, also:\n" + "".join(traceback.format_exception(closing)))


class RunScope(Scope):
    """A run, from `before_run` to `after_run` and the delivery of all events.

    A scope that is entered within another run of the same trainer does nothing.

    Args:
        trainer: the trainer.
        trains: False for a run that only evaluates.
    """

    def __init__(self, trainer: LoopTrainer, *, trains: bool = True) -> None:
        super().__init__(trainer)
        self._trains = trains
        self._outermost = False
        self._outside: tuple[EventStorage, ...] = ()  # the storages that were current before the run
        self._exited = self._finished = True  # so that nothing is ended if the run cannot be opened

    def __enter__(self) -> Self:
        """Prepare the trainer for the run, and emit `before_run`."""
        self._outermost = not self.trainer.running
        if self._outermost:
            self._outside, self._finished = ENTERED.get(), False
            try:
                self.trainer.open_run(trains=self._trains)
                self.trainer.metrics.__enter__()  # so that `get_event_storage` returns it
                self._exited = False
            except BaseException:
                self._finish()
                raise
        return super().__enter__()

    def begin(self) -> None:
        """Emit `before_run` in the outermost run, and first set up the storing of undelivered events."""
        if self._outermost:
            trainer = self.trainer
            if trainer.ownership.may_write:
                store_undelivered(trainer.bus, trainer.facts, trainer.writers)
            trainer.announce(BeforeRun)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Emit `after_run`, deliver all events, exit the contexts of the run, and reset the trainer."""
        if not self._outermost:
            super().__exit__(kind, error, tb)
            return
        trainer = self.trainer
        try:
            self._exited = True
            try:
                super().__exit__(kind, error, tb)
            except BaseException as closing:
                trainer.during_run.__exit__(type(closing), closing, closing.__traceback__)
                raise
            trainer.during_run.__exit__(kind, error, tb)
        finally:
            self._finish()

    def complete_exit(self) -> None:
        """Complete an exit that a KeyboardInterrupt has prevented or cut short; do nothing otherwise."""
        if self._outermost and not self._exited:
            self.__exit__(*sys.exc_info())
        if self._outermost and not self._finished:
            self._finish()

    def _finish(self) -> None:
        """Reset the trainer and its parts after a run."""
        trainer, failure = self.trainer, self.trainer.failure
        trainer.running, trainer.failure, trainer.delivering = False, None, False
        trainer.passing = None
        trainer.during_run.close()  # does something only if an interrupt has cut the exit short
        trainer.stops.end_run()
        trainer.clock.end_run()
        trainer.modes.end_run(trainer.model)
        exit_run(trainer.metrics, self._outside)
        trainer.commands.end_run(failure)
        trainer.ownership.end()
        self._finished = True

    def end(self, reason: str, error: BaseException | None) -> None:
        """Emit `after_run`, then log the last metrics, and deliver all events or close the bus."""
        if not self._outermost:
            return
        trainer, at_once = self.trainer, ends_at_once(self.trainer)
        trainer.ownership.ending()
        closes = error is not None or trainer.ends_program  # else the bus stays open for another run
        trainer.clock.end_pass("end")
        try:
            text = None if error is None else error_text(error)
            signum = trainer.stop_signal
            name = None if signum is None else signal.Signals(signum).name
            trainer.ownership.outcome = Outcome(reason, text, name)
            trainer.announce(AfterRun, reason=reason, error=text, signal=name)
        except BaseException as handler_error:
            closes, at_once = True, at_once or isinstance(handler_error, KeyboardInterrupt)
            raise
        finally:
            try:
                log_rest(trainer)
            finally:
                drain(trainer, closes=closes, at_once=at_once)


def run_scope(trainer: LoopTrainer, *, trains: bool = True, grad_mode: bool = True) -> tuple[RunScope, Undo]:
    """Return the scope of a run, and an `Undo` around it that ends the run at whatever point Ctrl-C comes.

        scope, undo = run_scope(trainer)
        with undo, undo, scope:
            ...

    Args:
        trainer: the trainer.
        trains: False for a run that only evaluates.
        grad_mode: False in a generator, as for `Undo`.
    """
    scope, undo = RunScope(trainer, trains=trains), Undo(grad_mode=grad_mode)
    undo.step(scope.complete_exit)
    return scope, undo


class TrainScope(Scope):
    """Emit `before_train` when a training begins, and `after_train` when it ends.

    Args:
        trainer: the trainer.
        first: False for a training that begins again after a rollback.
    """

    def __init__(self, trainer: LoopTrainer, *, first: bool = True) -> None:
        super().__init__(trainer)
        self._first = first

    def begin(self) -> None:
        """Emit `before_train`, and at the first training of a run record which modules are in eval mode."""
        self.trainer.announce(BeforeTrain)
        if self._first:
            # after the handlers, which may have set some modules to eval mode
            self.trainer.modes.begin_run(self.trainer.model)

    def end(self, reason: str, error: BaseException | None) -> None:
        """Emit `after_train`; unless a rollback begins the training again, record that the run is ending."""
        trainer = self.trainer
        if not trainer.stops.goes_back:
            trainer.ownership.ending()
        trainer.clock.end_pass("end")
        trainer.announce(AfterTrain, reason=reason)
        if reason == LEFT and trainer.where_to_resume:  # a generator cannot add this as a note to the error
            logger.warning("the training was left before its end: %s", trainer.where_to_resume)


def trainings(trainer: LoopTrainer) -> Iterator[TrainScope]:
    """Yield the scope of the training, and another scope after each rollback of the run.

    for training in trainings(trainer):
        with training:
            ...
    """
    yield TrainScope(trainer)
    while trainer.commands.go_back():
        yield TrainScope(trainer, first=False)


class EvalScope(Scope):
    """A validation, test or prediction: emit the events at its begin and end, and set the trainer's mode."""

    _EVENTS: dict[str, tuple[type[Event], type[Event]]] = {  # noqa: RUF012
        "val": (BeforeVal, AfterVal),
        "test": (BeforeTest, AfterTest),
        "predict": (BeforePredict, AfterPredict),
    }

    def __init__(self, trainer: LoopTrainer, mode: str) -> None:
        super().__init__(trainer)
        self._mode = mode
        self._outer_mode = trainer.mode

    def begin(self) -> None:
        self.trainer.mode = self._mode
        self.trainer.announce(self._EVENTS[self._mode][0])

    def end(self, reason: str, error: BaseException | None) -> None:
        """Emit the closing event with the metrics, and restore the outer mode also after an error."""
        metrics = {} if self._mode == "predict" else {"metrics": self.metrics}
        try:
            self.trainer.announce(self._EVENTS[self._mode][1], reason=reason, **metrics)
        finally:
            self.trainer.mode = self._outer_mode


class EpochScope(Scope):
    """An epoch of a training, or a pass of a validation or test; a complete train epoch is counted."""

    _EVENTS: dict[str, tuple[type[Any], type[Any]]] = {  # noqa: RUF012
        "train": (BeforeTrainEpoch, AfterTrainEpoch),
        "val": (BeforeValEpoch, AfterValEpoch),
        "test": (BeforeTestEpoch, AfterTestEpoch),
    }

    def __init__(self, trainer: LoopTrainer, mode: str) -> None:
        super().__init__(trainer)
        self._mode = mode

    def begin(self) -> None:
        if self._mode == "train":
            self.trainer.open_epoch()
        self.trainer.announce(self._EVENTS[self._mode][0])

    def end(self, reason: str, error: BaseException | None) -> None:
        """Emit the closing event, and count a complete epoch of a training."""
        trainer, after = self.trainer, self._EVENTS[self._mode][1]
        if self._mode != "train":
            trainer.announce(after, reason=reason, metrics=self.metrics)
            return
        keeps_epoch = reason not in (ERROR, LEFT) and not trainer.stops.goes_back
        if keeps_epoch and trainer.position.at_end:
            reason = COMPLETED  # a stop that was requested in the last iteration has not cut the epoch short
        # also reset after an error in the middle of an update of several batches
        trainer.passing, trainer.counting.before = None, 0
        trainer.clock.end_pass()
        trainer.within = "epoch" if reason == COMPLETED else ""
        try:
            trainer.announce(after, reason=reason)
        finally:  # also after the error of a handler, because other handlers have worked for the epoch
            trainer.within = ""
            if reason in (COMPLETED, LEFT):  # after a `break` a hand-written loop goes on with the next epoch
                trainer.completed_epoch()


_until_exit: list[Iterator[Any]] = []
"""The iterator of an unfinished pass over a loader, in the last run that a signal has ended."""


def retain_until_end(trainer: LoopTrainer, batches: Iterator[Any]) -> None:
    """Keep a reference to the iterator of an unfinished pass over a loader until the run ends.

    A DataLoader's iterator that is freed waits up to five seconds for each worker process, and after a signal
    the checkpoint must be saved first. If a signal ends the program, the reference is kept until the
    interpreter exits, which terminates the workers without a wait. An interactive session drops it.
    """

    def retain() -> None:
        if trainer.ends_program and not hasattr(sys, "ps1"):
            _until_exit[:] = [batches]

    trainer.during_run.callback(retain)
