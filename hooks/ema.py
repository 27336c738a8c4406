"""A hook that averages the model's weights, and evaluates with the averaged weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from msgspec import UNSET
from torch import nn

from eventloop.checkpoint.weights import LOADS_OWN, OWN, unwrap
from eventloop.evaluation.other_weights import check_other_weights
from eventloop.events import (
    COMPLETED,
    AfterLoadCheckpoint,
    AfterPredict,
    AfterRun,
    AfterTest,
    AfterTestEpoch,
    AfterTrain,
    AfterTrainEpoch,
    AfterTrainIter,
    AfterVal,
    AfterValEpoch,
    BeforePredict,
    BeforeRun,
    BeforeSaveCheckpoint,
    BeforeTestEpoch,
    BeforeTrain,
    BeforeValEpoch,
    OptimizerStepSkipped,
)
from eventloop.events.priority import Priority
from eventloop.hooks.checkpoint import CheckpointHook
from eventloop.hooks.hook import Hook, on
from eventloop.hooks.order_check import refuse_late_average
from eventloop.model import average_checkpoint
from eventloop.model.average_checkpoint import AverageState, has_lazy_parts, load_average, read_state
from eventloop.model.average_config import arguments_of, average_config, build_average, is_own
from eventloop.model.average_pairs import Swap
from eventloop.model.averages import BaseAveragedModel
from eventloop.optim.optimizers import each_optimizer, hookable
from eventloop.state.sharded import refuse_old_shards
from eventloop.util.checks import at_least, check_bools, check_choice

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")

PREFIX = "ema"
"""The prefix of the metrics of the average with `validate="both"`."""


class EMAHook(Hook):
    """Average the model's weights during training; validations, tests and predictions use the average.

        EMAHook()                                                        # exponential, momentum 0.0002
        EMAHook(ema_type="StochasticWeightAverage", begin_epoch=75)
        EMAHook(validate="both")                                         # "accuracy" and "ema/accuracy"
        EMAHook(ema_type=MyAverage, my_option=3)                         # your subclass of BaseAveragedModel
        EMAHook(ema_type=dict(type="MomentumAnnealingEMA", gamma=100))

    The average is updated after each iteration in which an optimizer of the trainer made a step, not after
    iterations that only accumulate gradients or whose step was skipped. If the trainer has no optimizer, it
    is updated after every iteration. The first update copies the model's weights; until then the model itself
    is evaluated. docs/recipes.md has a handler for an average that begins with the initial weights.

    Training always uses the model's own weights, also after an evaluation that failed or was interrupted. An
    evaluation needs memory for one more copy of the weights. A checkpoint's `state_dict` is the average, so a
    program that loads it has the evaluated weights; the model's own weights are in `ema_state_dict`.
    `Trainer.resume` with this hook restores both exactly. `Trainer.load_checkpoint` loads the average into
    the model, and averaging starts again. Each rank averages only its own part of a DTensor.

    Args:
        ema_type: "ExponentialMovingAverage", "StochasticWeightAverage", "MomentumAnnealingEMA", a registered
            name, a subclass of `BaseAveragedModel`, or a config `dict(type=..., ...)`.
        strict_load: True refuses a checkpoint in which the average and the model's own weights have different
            parameter names; False logs the difference.
        begin_iter: the iteration of the first update, counted from 1.
        begin_epoch: the epoch of the first update, counted from 1; not together with `begin_iter`.
        validate: "average" evaluates only the average. "both" evaluates the model's own weights, and then the
            average on the same batches with the same random numbers. The metrics of the average then have the
            prefix "ema/", and the events of its iterations `loader="ema"`, or "ema/NAME" if there are several
            loaders; `Trainer.load_checkpoint` loads both. Predictions always use the average.
        arguments: the average's arguments: `momentum`, `gamma`, `interval`, `device`, `update_buffers`.

    Raises:
        TypeError, ValueError: an argument of the hook or of the average is unknown, of the wrong type or out
            of range.
    """

    priority = 49

    def __init__(
        self,
        ema_type: str | type[BaseAveragedModel] | Mapping[str, Any] = "ExponentialMovingAverage",
        strict_load: bool = False,
        begin_iter: int = 0,
        begin_epoch: int = 0,
        validate: Literal["average", "both"] = "average",
        **arguments: Any,
    ) -> None:
        check_bools(strict_load=strict_load)
        at_least("begin_iter", begin_iter, 0)
        at_least("begin_epoch", begin_epoch, 0)
        if begin_iter and begin_epoch:
            raise ValueError(
                f"give begin_iter or begin_epoch, not both: got begin_iter={begin_iter}, "
                f"begin_epoch={begin_epoch}"
            )
        check_choice("validate", validate, ("average", "both"))
        self._config, self._both = average_config(ema_type, arguments), validate == "both"
        self._strict_load = strict_load
        self._begin_iter, self._begin_epoch = begin_iter, begin_epoch
        self._average: BaseAveragedModel | None = None
        self._model: nn.Module | None = None
        self._swap = Swap()
        self._evaluating: set[str] = set()  # the modes of the evaluations that use the average now
        self._to_load: AverageState | None = None  # the average of a checkpoint that is being loaded
        # `trainer.state.loads` when the average was last restarted; None after a resume has restored it
        self._loads: int | None = 0
        self._step_handles: list[Any] = []
        self._stepped = self._ever_stepped = False  # whether an optimizer stepped in this iteration, or ever
        self._first_iter = 0

    def check(self, trainer: Trainer) -> None:
        """Refuse a trainer with which the average would never begin, be saved too early, or not be evaluated.

        Raises:
            ValueError: `begin_epoch` in a run measured in iterations, a start after the end of the run, a
                priority after that of a `CheckpointHook`, or `validate="both"` with a loader named "ema" or
                in another engine's loop.
            TypeError: FSDP1 shards the model, or it has a ShardedTensor.
        """
        refuse_old_shards("EMAHook", unwrap(trainer.model))
        self._refuse_late_begin(trainer)
        if self._both:
            check_other_weights(trainer, PREFIX, 'EMAHook(validate="both")')
        checkpoint_hooks = [hook for hook in trainer.hooks if isinstance(hook, CheckpointHook)]
        refuse_late_average(self, checkpoint_hooks, trainer.hooks)
        # tests a user's class; the constructor of this hook has tested the arguments of eventloop's own
        if not is_own(self._config) and not has_lazy_parts(unwrap(trainer.model)):
            self._average = self._build(unwrap(trainer.model))

    def _refuse_late_begin(self, trainer: Trainer) -> None:
        """Refuse a `begin_epoch` or `begin_iter` that the run never reaches."""
        if self._begin_epoch and not trainer.by_epoch:
            raise ValueError(
                f"EMAHook(begin_epoch={self._begin_epoch}) in a run measured in iterations would never "
                "begin: use begin_iter, or give the Trainer max_epochs"
            )
        for name, begin, end in (
            ("begin_epoch", self._begin_epoch, trainer.max_epochs),
            ("begin_iter", self._begin_iter, trainer.max_iters),
        ):
            if end is not None and begin > end:
                raise ValueError(f"EMAHook({name}={begin}) would never begin: the run ends at {end}")

    @property
    def ema_model(self) -> BaseAveragedModel:
        """The average; `ema_model.module` is a model with the averaged weights, to be exported or called.

        Before the first update the average has the model's own weights. The average of a model with DTensors
        has DTensors, and cannot be called.

        Raises:
            RuntimeError: no training has begun.
        """
        if self._average is None or self._model is None:
            raise RuntimeError("EMAHook has no average yet: it is made when training begins")
        if not self._average.steps:
            self._average.update_parameters(self._model)
            self._average.restart()
        self._average.sync_buffers(self._model)
        return self._average

    # --- averaging -----------------------------------------------------------------------------------------

    def before_run(self, trainer: Trainer, event: BeforeRun) -> None:
        """Restart the average if weights were loaded into the model since the last run.

        Raises:
            ValueError: the trainer has two EMAHooks.
            TypeError: FSDP1 has sharded the model since the trainer was built.
        """
        refuse_old_shards("EMAHook", unwrap(trainer.model))
        if sum(isinstance(hook, EMAHook) for hook in trainer.hooks) > 1:
            raise ValueError("the trainer has two EMAHooks: only one average can be evaluated and saved")
        self._restart_if_loaded(trainer)

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Build the average if it does not exist, and register a hook for the steps of each optimizer."""
        model = self._model_of(trainer)
        if self._average is None and not has_lazy_parts(model):
            self._average = self._build(model)
        self._remove_step_handles()
        optimizers = [each for each in map(hookable, each_optimizer(trainer.optimizer)) if each is not None]
        # torch calls the function after every step of the optimizer, whoever calls step()
        self._step_handles = [each.register_step_post_hook(self._optimizer_stepped) for each in optimizers]
        self._stepped = self._ever_stepped = not self._step_handles
        self._first_iter = trainer.iter

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Remove the hooks from the optimizers, and warn if no optimizer made a step."""
        if event.reason == COMPLETED and trainer.iter > self._first_iter and not self._ever_stepped:
            logger.warning(
                "EMAHook averaged nothing: the trainer's optimizer was never stepped; pass the optimizer "
                "that your code steps to the Trainer"
            )
        self._remove_step_handles()

    def _optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._stepped = self._ever_stepped = True

    def optimizer_step_skipped(self, trainer: Trainer, event: OptimizerStepSkipped) -> None:
        """Cancel this iteration's update: a skipped optimizer step changes no weights."""
        self._stepped, self._ever_stepped = False, True

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Update the average if an optimizer made a step."""
        # without an optimizer every iteration counts as a step
        stepped, self._stepped = self._stepped, not self._step_handles
        if stepped:
            self._update(trainer, event.epoch + 1, event.iter + 1)

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Update the average if OptimizerHook made a step with gradients left at the end of the epoch."""
        if self._step_handles and self._stepped:
            self._stepped = False
            self._update(trainer, event.epoch + 1, event.iter)

    def _update(self, trainer: Trainer, epoch: int, iteration: int) -> None:
        """Update the average, if it has begun in this epoch and iteration, counted from 1."""
        if epoch < self._begin_epoch or iteration < self._begin_iter:
            return
        if trainer.state.loads != self._loads:
            self._restart_if_loaded(trainer)
        model = self._model_of(trainer)
        if self._average is None:  # a lazy model has no shapes before its first forward pass
            self._average = self._build(model)
        self._average.update_parameters(model)

    # --- evaluating ----------------------------------------------------------------------------------------

    @property
    def evaluated_as(self) -> str:
        """The prefix "ema" of the average's metrics with `validate="both"`; "" with "average"."""
        return PREFIX if self._both else ""

    @contextmanager
    def in_model(self, trainer: Trainer, mode: str) -> Iterator[None]:
        """Return a context in whose block the model has the averaged weights, if there was an update."""
        self._swap_in(trainer, mode)
        try:
            yield
        finally:
            self._swap_back(trainer, mode)

    def before_val_epoch(self, trainer: Trainer, event: BeforeValEpoch) -> None:
        """Swap the average into the model, unless `validate` is "both"."""
        if not self._both:
            self._swap_in(trainer, "val")

    def after_val_epoch(self, trainer: Trainer, event: AfterValEpoch) -> None:
        """Swap the model's own weights back, for whatever reason the validation ended."""
        self._swap_back(trainer, "val")

    def before_test_epoch(self, trainer: Trainer, event: BeforeTestEpoch) -> None:
        """Swap the average into the model, unless `validate` is "both"."""
        if not self._both:
            self._swap_in(trainer, "test")

    def after_test_epoch(self, trainer: Trainer, event: AfterTestEpoch) -> None:
        """Swap the model's own weights back, for whatever reason the test ended."""
        self._swap_back(trainer, "test")

    def before_predict(self, trainer: Trainer, event: BeforePredict) -> None:
        """Swap the average into the model."""
        self._swap_in(trainer, "predict")

    def after_predict(self, trainer: Trainer, event: AfterPredict) -> None:
        """Swap the model's own weights back, for whatever reason the prediction ended."""
        self._swap_back(trainer, "predict")

    # A Ctrl-C may come before the methods above have swapped back: then the next three methods do it.

    def after_val(self, trainer: Trainer, event: AfterVal) -> None:
        """Swap the model's own weights back if an interrupt prevented `after_val_epoch`."""
        self._swap_back(trainer, "val")

    def after_test(self, trainer: Trainer, event: AfterTest) -> None:
        """Swap the model's own weights back if an interrupt prevented `after_test_epoch`."""
        self._swap_back(trainer, "test")

    def after_run(self, trainer: Trainer, event: AfterRun) -> None:
        """Swap the model's own weights back if an interrupt prevented `after_val` or `after_test`."""
        self._evaluating.clear()
        self._swap.back()
        self._remove_step_handles()

    def _swap_in(self, trainer: Trainer, mode: str) -> None:
        """Swap the average, if it has an update, into the model for an evaluation of this mode."""
        self._restart_if_loaded(trainer)
        if self._average is not None and self._average.steps:
            self._evaluating.add(mode)
            trainer.copying.join()  # a running save may still copy the weights that the swap overwrites
            self._swap.put(self._average.pairs_with(self._model_of(trainer)))

    def _swap_back(self, trainer: Trainer, mode: str) -> None:
        """Swap the model's own weights back when the last evaluation that uses the average has ended."""
        self._restart_if_loaded(trainer)
        self._evaluating.discard(mode)
        if not self._evaluating:  # after a test within a validation the validation still needs the average
            self._swap.back()

    # --- saving and loading --------------------------------------------------------------------------------

    def before_save_checkpoint(self, trainer: Trainer, event: BeforeSaveCheckpoint) -> None:
        """Save the average as `state_dict`, and the model's own weights as `ema_state_dict`."""
        self._restart_if_loaded(trainer)
        if self._average is not None and self._average.steps and trainer.checkpoint is not None:
            average_checkpoint.store(trainer.checkpoint, self._average, self._model_of(trainer), self._swap)
            trainer.checkpoint["meta"].setdefault("needs_hooks", []).append(self.name)

    @on(priority=Priority.LOWEST)
    def after_load_checkpoint(self, trainer: Trainer, event: AfterLoadCheckpoint) -> None:
        """Check the checkpoint's average, and separate it from the model's own weights, as the last handler.

        Raises:
            CheckpointError: the average and the model's own weights belong to different models.
        """
        self._restart_if_loaded(trainer)
        self._model_of(trainer)
        assert trainer.checkpoint is not None
        average_checkpoint.check(trainer.checkpoint, strict=self._strict_load, source=event.path)
        average_checkpoint.separate(trainer.checkpoint, self.name)
        self._to_load = None
        if self._both and OWN in trainer.checkpoint:
            trainer.checkpoint[LOADS_OWN] = True  # so that the model gets its own weights
            self._to_load = read_state(trainer.checkpoint["hooks"][self.name])

    def settings(self) -> dict[str, Any]:
        """Return the options that a resume compares: the begin of averaging, and the average's arguments."""
        return {
            "begin_iter": self._begin_iter,
            "begin_epoch": self._begin_epoch,
            "validate": "both" if self._both else "average",
            **arguments_of(self._config),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates; the weights of the average are stored elsewhere in the checkpoint."""
        return {"steps": 0 if self._average is None else self._average.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Build a new average from the resumed checkpoint, so that a failed resume can restore the old one.

        Raises:
            RuntimeError: no checkpoint is being resumed.
            CheckpointError: `state` does not have the fields of this hook's state.
        """
        saved = read_state(state)
        if saved.average is UNSET or self._model is None:
            raise RuntimeError("EMAHook's own state does not hold the average: use Trainer.resume")
        self._load(self._model, saved)
        self._loads = self._to_load = None

    def _load(self, model: nn.Module, saved: AverageState) -> None:
        self._average = load_average(self._build, model, saved)
        # the resume loads other weights into the model, so those from before must not be swapped back
        self._swap, self._evaluating = Swap(), set()

    def _restart_if_loaded(self, trainer: Trainer) -> None:
        """Load or restart the average if weights were loaded into the model without a resume."""
        loads, self._loads = self._loads, trainer.state.loads
        if loads in (None, self._loads):  # a resume has restored the average, or nothing was loaded
            return
        self._swap, self._evaluating = Swap(), set()
        saved, self._to_load = self._to_load, None
        if saved is not None:
            self._load(self._model_of(trainer), saved)
        elif self._average is not None:
            self._average.restart()  # evaluations use the loaded weights until the next update

    def _build(self, model: nn.Module) -> BaseAveragedModel:
        average = build_average(self._config, model)
        average.copy_buffers = False  # evaluations use the model's own buffers; `ema_model` copies them
        return average

    def _model_of(self, trainer: Trainer) -> nn.Module:
        self._model = unwrap(trainer.model)
        return self._model

    def _remove_step_handles(self) -> None:
        for handle in self._step_handles:
            handle.remove()
        self._step_handles = []
