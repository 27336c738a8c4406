"""Things that begin and end: a run, a phase, an epoch. Whatever happens inside, the closing event is emitted.

An error of the body goes on as it is; an error of a closing handler on top of it is added to it as a note. A
generator closed by `break`, `return` or an exception in a hand-written loop closes with the reason "left".
"""

from __future__ import annotations

import logging
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from eventloop.events import (
    COMPLETED,
    AfterRun,
    AfterTest,
    AfterTestEpoch,
    AfterTrain,
    AfterTrainEpoch,
    AfterVal,
    AfterValEpoch,
    BeforeRun,
    BeforeTest,
    BeforeTestEpoch,
    BeforeTrain,
    BeforeTrainEpoch,
    BeforeVal,
    BeforeValEpoch,
    Event,
)

if TYPE_CHECKING:
    from eventloop.trainer import Trainer

logger = logging.getLogger("eventloop")

LEFT = "left"
ERROR = "error"


class Scope:
    """Emits one event on entry and one on exit."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.metrics: dict[str, float] = {}

    def begin(self) -> None:
        """Emit the opening event."""
        raise NotImplementedError

    def end(self, reason: str, error: BaseException | None) -> None:
        """Emit the closing event."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        left = isinstance(error, GeneratorExit)
        reason = LEFT if left else ERROR if error is not None else self.trainer.stop_reason or COMPLETED
        try:
            self.end(reason, None if left else error)
        except Exception as closing:
            if error is None:
                raise
            if left:  # raised from a generator's close, it would be swallowed by the interpreter
                logger.exception("a handler failed while a hand-written loop was being left")
            else:
                error.add_note("while closing, also:\n" + "".join(traceback.format_exception(closing)))


class RunScope(Scope):
    """before_run ... after_run, and then everything is delivered. Inside another run it does nothing."""

    def __enter__(self) -> Self:
        self._outermost = not self.trainer.running
        return super().__enter__()

    def begin(self) -> None:
        if self._outermost:
            self.trainer.begin_run()
            try:
                self.trainer.announce(BeforeRun)
            except BaseException as error:
                self.end(ERROR, error)
                raise

    def end(self, reason: str, error: BaseException | None) -> None:
        if not self._outermost:
            return
        trainer = self.trainer
        try:
            text = None if error is None else f"{type(error).__name__}: {error}"
            trainer.announce(AfterRun, reason=reason, error=text)
        finally:
            trainer.end_run(failed=error is not None)


class TrainScope(Scope):
    """before_train ... after_train."""

    def begin(self) -> None:
        self.trainer.announce(BeforeTrain)

    def end(self, reason: str, error: BaseException | None) -> None:
        self.trainer.announce(AfterTrain, reason=reason)


class EvalScope(Scope):
    """before_val ... after_val, or before_test ... after_test; the mode is the trainer's meanwhile."""

    def __init__(self, trainer: Trainer, mode: str) -> None:
        super().__init__(trainer)
        val = mode == "val"
        self._before: type[Event] = BeforeVal if val else BeforeTest
        self._after: type[Event] = AfterVal if val else AfterTest
        self._mode = mode
        self._outer_mode = trainer.mode

    def begin(self) -> None:
        self.trainer.mode = self._mode
        self.trainer.announce(self._before)

    def end(self, reason: str, error: BaseException | None) -> None:
        try:
            self.trainer.announce(self._after, reason=reason, metrics=self.metrics)
        finally:
            self.trainer.mode = self._outer_mode


class EpochScope(Scope):
    """before_X_epoch ... after_X_epoch. A training epoch counts once it was completed."""

    _EVENTS: dict[str, tuple[type[Any], type[Any]]] = {  # noqa: RUF012
        "train": (BeforeTrainEpoch, AfterTrainEpoch),
        "val": (BeforeValEpoch, AfterValEpoch),
        "test": (BeforeTestEpoch, AfterTestEpoch),
    }

    def __init__(self, trainer: Trainer, mode: str) -> None:
        super().__init__(trainer)
        self._mode = mode

    def begin(self) -> None:
        if self._mode == "train":
            self.trainer.begin_epoch()
        self.trainer.announce(self._EVENTS[self._mode][0])

    def end(self, reason: str, error: BaseException | None) -> None:
        trainer, after = self.trainer, self._EVENTS[self._mode][1]
        if self._mode != "train":
            trainer.announce(after, reason=reason, metrics=self.metrics)
            return
        if error is None and reason != LEFT and trainer.position.at_end:
            reason = COMPLETED  # a stop asked for in its last iteration
        trainer.announce(after, reason=reason)
        if reason in (COMPLETED, LEFT):  # a `break` out of a hand-written epoch goes on with the next one
            trainer.completed_epoch()
