"""Define the steps of a run as methods of `Trainer`, for its own loops and for loops that a user writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import MappingProxyType
from typing import Any

from eventloop.data.trainer_parts import Within
from eventloop.description.record import Begin
from eventloop.evaluation.compiled_outputs import begin_compiled_step, copied
from eventloop.evaluation.schedule import Evaluate
from eventloop.events import (
    AfterPredictIter,
    AfterTestIter,
    AfterTrainIter,
    AfterValIter,
    BeforePredictIter,
    BeforeTestIter,
    BeforeTrainIter,
    BeforeValIter,
)
from eventloop.events.base import known_events
from eventloop.migration.overrides import refuse_overrides
from eventloop.stops.stopping import Pass
from eventloop.training.protocols import LoopTrainer
from eventloop.training.scopes import EpochScope, EvalScope, RunScope, TrainScope

EVAL_ITERATIONS: dict[str, tuple[type[Any], type[Any]]] = {
    "val": (BeforeValIter, AfterValIter),
    "test": (BeforeTestIter, AfterTestIter),
    "predict": (BeforePredictIter, AfterPredictIter),
}
"""The events around an iteration of an evaluation or prediction, by mode."""


class SkipIteration(Exception):
    """Raised by a handler of `before_train_iter` to skip the batch; no iteration is counted for it."""


class LoopSteps(LoopTrainer):
    """The steps of a run, for a hand-written loop that fetches the batches itself.

        trainer.begin_run()
        try:
            for epoch in range(3):
                trainer.begin_epoch()
                for batch in loader:
                    if trainer.begin_iter(batch) and trainer.end_iter({"loss": loss_of(batch)}):
                        break
                trainer.end_epoch()
                if trainer.stopping:
                    break
                trainer.begin_val()
                trainer.end_val({"accuracy": evaluate()})
        except BaseException as error:
            trainer.end_run(error)
            raise
        trainer.end_run()

    Each step emits its events, in the order in which `train()` emits them. The loop itself moves data to the
    device, and calls `model.train()` and `model.eval()`. Call all steps on one thread.
    """

    iter: int
    epoch: int
    passing: Pass | None
    within: Within
    begun: Begin | None = None
    """The facts of the last training's begin, for `run.json`; None before the first training."""
    step_rates: Mapping[str, Any] = MappingProxyType({})
    """The learning rates of the iteration's optimizer steps, if a scheduler changes them before its end."""
    logged_by_host: Collection[str] = ()
    """The names of numbers that another engine logs itself; outputs of these names become "outputs/NAME"."""
    _open: list[tuple[str, ExitStack]]
    """The parts of the run that have begun and not ended, with their open scopes, the outermost first."""
    _evaluated: tuple[EvalScope, EpochScope]
    """The scopes of the evaluation that `begin_val` has begun last."""

    @property
    def batch_idx(self) -> int:
        """The index of the current batch in its pass over the loader; between iterations, of the next batch.

        With `unit="update"` each batch within an update counts.
        """
        return self.position.batches + self.counting.before

    @batch_idx.setter
    def batch_idx(self, index: int) -> None:
        self.position.batches, self.counting.before = index, 0

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a class with a method that has the name of an event, because no event calls it."""
        super().__init_subclass__(**options)  # a mixin class may take options
        # only eventloop's own events: a method of the program may have the name of the program's own event
        own_events = [
            name
            for name, classes in known_events().items()
            if any(event_type.__module__.startswith("eventloop.") for event_type in classes)
        ]
        refuse_overrides(cls, own_events)

    def begin_run(self, *, training: bool = True) -> None:
        """Begin a run and its training: emit `before_run` and `before_train`.

        Args:
            training: False for a run that only evaluates, without `before_train`.

        Raises:
            RuntimeError: the trainer is already in a run.
            ValueError: the trainer has `unit="update"`.
        """
        self.refuse_within("begin_run")
        if self.counting.accumulator is not None:
            raise ValueError(
                f'begin_run() begins a loop whose iterations are batches, and unit="update" makes one of '
                f"{self.counting.batches_per_iter} batches: call train(), write `for batch in "
                "trainer.batches(loader)`, or leave unit out"
            )
        self._open_part("run", RunScope(self, trains=training), *([TrainScope(self)] if training else []))
        if training:
            self.commands.begin_training()

    def begin_epoch(self, length: int | None = None) -> None:
        """Begin an epoch: emit `before_train_epoch`.

        Args:
            length: the number of batches of the epoch; None if it is unknown.

        Raises:
            RuntimeError: no run has begun, or an epoch has not ended.
        """
        if not self.running or self.passing is not None:
            raise RuntimeError(_order("begin_epoch", "after begin_run() or end_epoch()"))
        self._open_part("epoch", EpochScope(self, "train"))
        self.position.length = length
        self.passing = Pass(self.stops, length, endless=length is None, trains=True)
        self.clock.begin_pass()

    def begin_iter(self, batch: Any) -> bool:
        """Begin an iteration with its batch: emit `before_train_iter`.

        Returns:
            False if a handler skips the batch by `SkipIteration`. In this case fetch the next batch, and do
            not call `end_iter`.

        Raises:
            RuntimeError: no epoch has begun.
        """
        if self.passing is None:
            raise RuntimeError(_order("begin_iter", "after begin_epoch() or end_iter()"))
        if self.compiled:
            begin_compiled_step()
        self.batch, self.outputs = batch, None
        self.clock.end_data()
        self.metrics.in_iteration = True
        try:
            self.announce(BeforeTrainIter, batch_idx=self.position.batches // self.counting.batches_per_iter)
        except SkipIteration:
            self._skip_batch()
            return False
        self.clock.begin_forward()
        return True

    def skip_iter(self) -> None:
        """Skip a batch that a rollback leaves out; no event is emitted."""
        self.clock.end_data()
        self.position.skip_one()
        self._skip_batch()

    @property
    def in_steps(self) -> bool:
        """True in a run that `begin_run` has begun, so that a hand-written loop fetches the batches."""
        return bool(self._open)

    def _skip_batch(self) -> None:
        """Count a batch that is not trained on, and begin the wait for the next one."""
        self.clock.skip()
        self.position.batches += 1
        self.metrics.in_iteration = False
        if self.by_epoch and self.passing is not None:
            self.passing.stops(-(-self.position.batches // self.counting.batches_per_iter))  # rounded up

    def end_iter(self, outputs: Any) -> bool:
        """End an iteration: emit `after_train_iter`, at which an optimizer hook makes its step, and count it.

        Args:
            outputs: the outputs of the forward pass, a mapping with `loss`; None if the loop has none.

        Returns:
            True if the loop must end here, because a handler, a signal or another rank requested a stop.

        Raises:
            RuntimeError: no iteration has begun.
        """
        if self.passing is None or not self.metrics.in_iteration:
            raise RuntimeError(_order("end_iter", "after begin_iter()"))
        self.outputs = copied(outputs) if self.compiled else outputs
        self.clock.end_forward()
        if not self.steps_in_hook:  # the loop has made the optimizer's step, or there is none
            self.within = "iter"
        try:
            self.announce(AfterTrainIter, batch_idx=self.position.batches // self.counting.batches_per_iter)
        except BaseException:
            if self.within:  # the optimizer's step was made, so a later run must not repeat the iteration
                self.completed_iteration()
            raise
        self.completed_iteration()
        self.bus.poll(self)
        self.clock.end()
        # the number of iterations in the pass so far, rounded up
        self.passing.stops(-(-self.position.batches // self.counting.batches_per_iter), trained=True)
        self.clock.begin()
        return self.stopping

    def end_epoch(self) -> None:
        """End the epoch: emit `after_train_epoch`, and count the epoch unless a stop has cut it short.

        Raises:
            RuntimeError: no epoch has begun, or an evaluation within it has not ended.
        """
        scopes = self._begun("epoch")
        if self.passing is not None:
            self.passing.end(self.position.batches)
        scopes.close()

    def begin_val(self, mode: Evaluate = "val") -> None:
        """Begin an evaluation, between two iterations or epochs: emit `before_val` and `before_val_epoch`.

        Its time does not count as part of an iteration.

        Args:
            mode: "val", or "test" for the events of a test.
        """
        if not self.running or self.mode != "train":
            raise RuntimeError(_order("begin_val", "after begin_run(), end_iter() or end_epoch()"))
        self._evaluated = EvalScope(self, mode), EpochScope(self, mode)
        self._open_part("evaluation", self.clock.excluding(), *self._evaluated)

    def begin_val_iter(self, batch: Any, batch_idx: int, loader: str = "") -> None:
        """Begin an iteration of an evaluation: emit `before_val_iter`, or `before_test_iter`.

        Args:
            loader: the name of the loader, if there are several.
        """
        self.batch = batch
        self.announce(EVAL_ITERATIONS[self.mode][0], batch_idx=batch_idx, loader=loader)

    def end_val_iter(self, outputs: Any, batch_idx: int, loader: str = "") -> None:
        """End an iteration of an evaluation: emit `after_val_iter`, or `after_test_iter`.

        Args:
            loader: the name of the loader, if there are several.
        """
        self.outputs = outputs
        self.announce(EVAL_ITERATIONS[self.mode][1], batch_idx=batch_idx, loader=loader)
        self.bus.poll(self)

    def end_val(self, metrics: Mapping[str, float]) -> None:
        """End the evaluation: emit `after_val_epoch` and `after_val` with its metrics.

        Raises:
            RuntimeError: no evaluation has begun.
        """
        scopes = self._begun("evaluation")
        for scope in self._evaluated:
            scope.metrics, scope.complete = dict(metrics), True
        scopes.close()

    def end_run(self, error: BaseException | None = None) -> None:
        """End the run and all its open parts: emit the closing events, and deliver all events.

        Args:
            error: the error that ended the loop, if any. This method does not raise it.
        """
        all_scopes = ExitStack()
        for _, scopes in self._open:
            all_scopes.push(scopes)
        self._open.clear()
        if error is None:
            all_scopes.close()
        else:
            all_scopes.__exit__(type(error), error, error.__traceback__)

    def completed_iteration(self) -> None:
        """Count the iteration that ends, and its batches."""
        metrics = self.metrics
        self.within = ""
        self.iter = metrics.iter = self.iter + 1
        self.position.batches += self.counting.batches
        self.counting.before = 0
        metrics.in_iteration = False
        self.position.evaluated = 0

    def completed_epoch(self) -> None:
        """Count the epoch that ends, and begin the next one at batch 0.

        If `max_iters` measures the run, the whole run is one epoch. At its end the position in the loader is
        kept, because a longer run continues the same pass.
        """
        self.epoch = self.metrics.epoch = self.epoch + 1
        if self.by_epoch or not self.position.at_end:
            self.position.end_pass()

    def _open_part(self, part: str, *scopes: AbstractContextManager[Any]) -> None:
        """Enter the scopes of a part of the run; if a scope raises an error, exit those entered before it.

        Args:
            part: the name of the part, such as "epoch".
        """
        with ExitStack() as entered:
            for scope in scopes:
                entered.enter_context(scope)
            self._open.append((part, entered.pop_all()))

    def _begun(self, part: str) -> ExitStack:
        """Return the scopes of the part that began last, and remove it from the open parts.

        Raises:
            RuntimeError: the part that began last is not `part`.
        """
        if not self._open or self._open[-1][0] != part:
            last = f"the {self._open[-1][0]} was begun last" if self._open else "no run was begun"
            raise RuntimeError(f"expected the end of a part that was begun, got that of the {part}: {last}")
        return self._open.pop()[1]


def _order(step: str, place: str) -> str:
    """Return the text of an error for a step that was called in the wrong place."""
    return f"{step}() belongs {place}: see the order of steps in the documentation of Trainer.begin_run"
