"""The hook that runs backward and the optimizer's step in each training iteration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eventloop.costs.step_clock import BACKWARD_BEGINS, BACKWARD_ENDS, OPTIMIZER_ENDS
from eventloop.events import (
    COMPLETED,
    AfterBackward,
    AfterOptimizerStep,
    AfterTrain,
    AfterTrainEpoch,
    AfterTrainIter,
    BeforeOptimizerStep,
    BeforeRun,
    BeforeSaveCheckpoint,
    BeforeTrain,
    BeforeTrainIter,
    Event,
    OptimizerStepSkipped,
)
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook, on
from eventloop.migration.names import knowing_others
from eventloop.model.unused_parameters import AnomalousParams
from eventloop.optim.clipping import GradClip, TunableClip
from eventloop.optim.meshes import any_dtensor
from eventloop.optim.optimizers import named_optimizers, named_values, refuse_closures
from eventloop.state.schema import read_as
from eventloop.state.sharded import refuse_old_shards
from eventloop.training.accumulation import Accumulation, SavedWindow
from eventloop.training.mixed_precision import LossScale, MixedPrecision
from eventloop.training.outputs import detached, explain_freed_graph, loss_of
from eventloop.training.update_batches import UpdateBatches
from eventloop.util.checks import check_bools, positive

if TYPE_CHECKING:
    from eventloop.bus import Bus
    from eventloop.training.trainer import Trainer


logger = logging.getLogger("eventloop")


class OptimizerHook(UpdateBatches, TunableClip, Hook):
    """Run zero_grad, backward, clipping and the optimizer's step after each forward pass.

        OptimizerHook(grad_clip=dict(max_norm=35, norm_type=2))          # mmcv's form
        OptimizerHook(grad_clip=dict(type="value", clip_value=0.5))      # MMEngine's form

    `after_backward`, `before_optimizer_step` and `after_optimizer_step` are emitted between these actions.
    With clipping by norm, the norm before clipping is recorded as the metric `grad_norm`; the training thread
    does not wait for its value.

    After the step the tensors of `trainer.outputs`, if that is a dict, are detached, so later handlers may
    call `float(trainer.outputs["loss"])`. A handler that needs the autograd graph needs a priority below 30.

    With several optimizers, `optimizer=dict(generator=..., critic=...)`, one loss trains all of them. The
    hook zeroes, clips (`grad_norm/<name>`) and steps them one after another, in the order of the dict. For a
    loss per optimizer, or alternating steps, write a `train_step` that makes the steps, and pass
    `default_hooks=dict(optimizer=None)`.

    With `cumulative_iters` the hook works like `GradientCumulativeOptimizerHook`, and with `dtype` or
    `loss_scale` like `AmpOptimizerHook`. These two classes have the same options in another order.

    Args:
        grad_clip: keyword arguments of `torch.nn.utils.clip_grad_norm_` or, with type="value", of
            `clip_grad_value_`; applied to all parameters of an optimizer together, in the model's order.
            Parameters that no optimizer has are neither clipped nor in the norm.
        detect_anomalous_params: log the trainable parameters on which the loss does not depend, in the first
            iteration and whenever they change. This walks the graph in every iteration, which is slow.
        cumulative_iters: iterations per optimizer step, or with `Trainer(unit="update")` batches per step.
            None makes a step in each iteration, and each iteration has one batch.
        loss_scale, dtype: see `AmpOptimizerHook`; None trains the model in its own types.

    Raises:
        TypeError, ValueError: `grad_clip` has an unknown type or argument, or lacks `max_norm` or
            `clip_value`; or another option is of the wrong type, unknown or out of range.
    """

    priority = Priority.HIGH
    owns = "backward and the optimizer's step"
    runs_phases = ("backward", "optimizer")

    @knowing_others
    def __init__(
        self,
        grad_clip: Mapping[str, Any] | None = None,
        detect_anomalous_params: bool = False,
        *,
        cumulative_iters: int | None = None,
        loss_scale: LossScale | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        check_bools(detect_anomalous_params=detect_anomalous_params)
        self._clip = None if grad_clip is None else GradClip(grad_clip)
        if cumulative_iters is not None:
            positive("cumulative_iters", cumulative_iters)
        self.cumulative_iters = cumulative_iters or 1
        full_precision = loss_scale is None and dtype is None
        # mixed precision accumulates too, so that a later step has the gradients of a step that failed
        accumulates = not full_precision or cumulative_iters is not None
        self._precision = None if full_precision else MixedPrecision(loss_scale, dtype)
        self._window = Accumulation(self.cumulative_iters) if accumulates else None
        self._parameter_order: dict[Tensor, int] = {}  # the index of each of the model's parameters
        self._over_meshes = False  # whether any parameter is a DTensor, which is on a mesh of devices
        self._anomalous = AnomalousParams() if detect_anomalous_params else None
        self._other_seconds = 0.0  # of the handlers of events within the step, in this iteration
        self._given: Any = None  # the value of `trainer.optimizer` from which `_optimizers` was made
        self._optimizers: list[torch.optim.Optimizer] = []
        self._wanted: Mapping[type[Event], bool] = {}  # whether an event has a subscriber

    @property
    def stateful(self) -> bool:
        """True if the hook accumulates gradients or trains in mixed precision, or a subclass has a state."""
        return self._window is not None or type(self).state_dict is not OptimizerHook.state_dict

    def check(self, trainer: Trainer) -> None:
        """Prepare autocast, the `GradScaler`, and optimizers whose accumulated gradients a resume may load.

        `trainer.steps_in_hook` says that this hook steps the optimizer, not the train step.

        Raises:
            RuntimeError: the device does not support autocast to the type.
            TypeError: an optimizer's step needs a closure; or FSDP1 shards the model, so that each rank would
                clip or unscale its own part of the gradients only.
        """
        refuse_closures(trainer.optimizer)
        trainer.steps_in_hook = True
        self._wanted = trainer.bus.wanted(AfterBackward, BeforeOptimizerStep, AfterOptimizerStep)
        if self._window is not None:
            self._window.model, self._window.loss_fn = trainer.model, trainer.loss_fn
            if trainer.optimizer is not None:
                self._set_optimizers(trainer)
            self._window.warn_of_batchnorm(trainer.model)
        if self._precision is not None:
            self._precision.prepare(trainer.model)
            trainer.autocast = self._precision.autocast
        if self._clip is not None and self._clip.by_norm:
            refuse_old_shards("grad_clip by norm", trainer.model)
        if self._precision is not None and self._precision.scaler is not None:
            refuse_old_shards("the loss scale", trainer.model)

    def _subscriptions(self, bus: Bus) -> Iterator[tuple[Callable[..., Any], list[str]]]:
        """Yield the methods with an effect: of this class only `after_train_iter` unless it accumulates."""
        for method, events in super()._subscriptions(bus):
            name = method.__name__
            is_of_this_class = getattr(OptimizerHook, name, None) is getattr(method, "__func__", None)
            if self._window is not None or not is_of_this_class or name == "after_train_iter":
                yield method, events

    # --- before the forward pass ---------------------------------------------------------------------------

    def before_run(self, trainer: Trainer, event: BeforeRun) -> None:
        """Choose the autocast type and the `GradScaler` again if the model was moved to another device."""
        if self._precision is not None:
            self._precision.prepare(trainer.model)

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Load the accumulated gradients of a resumed checkpoint into the parameters."""
        if self._window is not None:
            self._window.open(trainer.model)

    @on(priority=Priority.LOWEST)
    def before_train_iter(self, trainer: Trainer, event: BeforeTrainIter) -> None:
        """Enter autocast, and suspend the ranks' exchange of gradients in an iteration without a step."""
        if self._window is not None:
            self._window.suspend_exchange(trainer)
        if self._precision is not None:
            self._precision.begin_forward()

    # --- backward and the step -----------------------------------------------------------------------------

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Run backward and, unless gradients are to be accumulated further, clip them and make the step.

        With `Trainer(unit="update")` the batches' backward passes have run when this method is called.

        Raises:
            TypeError: `trainer.outputs` holds no loss tensor.
            RuntimeError: the loss needs no grad, its graph is freed, or the trainer has no optimizer.
        """
        clock, window = trainer.clock, self._window
        device_clock, start = clock.device, perf_counter() - clock.excluded
        self._other_seconds = backward_seconds = 0.0
        if window is not None and trainer.counting.accumulator is self:  # unit="update"
            window.complete(trainer)
            steps = True
        else:
            clock.backward = backward_seconds = self._run_backward(trainer)
            steps = window is None or window.ends(trainer)
            if self._wanted[AfterBackward]:
                self._announce(trainer, AfterBackward)
        if steps and self._precision is None:
            self._clip_and_step(trainer)
        elif steps:
            self._step(trainer)
        if device_clock is not None:
            device_clock.mark(OPTIMIZER_ENDS)
        trainer.outputs = detached(trainer.outputs)
        clock.optimizer = perf_counter() - clock.excluded - start - backward_seconds - self._other_seconds

    def _run_backward(self, trainer: Trainer) -> float:
        """Run zero_grad, unless gradients are accumulated, and backward; return the seconds of backward."""
        if trainer.optimizer is not self._given or self._given is None:
            self._set_optimizers(trainer)
        loss, window, clock = loss_of(trainer.outputs), self._window, trainer.clock
        if window is None or not window.count:  # no gradients are accumulated
            if window is not None:
                window.divisor = window.length(trainer)
            for optimizer in self._optimizers:
                optimizer.zero_grad(set_to_none=True)
        if self._anomalous is not None:
            self._anomalous.check(loss, trainer.model)
        start = perf_counter() - clock.excluded
        if clock.device is not None:
            clock.device.mark(BACKWARD_BEGINS)
        try:
            if window is None:
                loss.backward()
            else:
                window.backward(loss, self._precision)
        except RuntimeError as error:
            explain_freed_graph(error)
            raise
        seconds = perf_counter() - clock.excluded - start
        if clock.device is not None:
            clock.device.mark(BACKWARD_ENDS)
        return seconds

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Make a step with the remaining accumulated gradients at the end of the last epoch."""
        window = self._window
        if window is None:
            return
        if self._precision is not None:
            self._precision.end_forward()  # autocast is still on after a failed forward pass or skipped batch
        window.resume_exchange()
        if trainer.counting.accumulator is self:
            window.count = 0  # drops gradients of an iteration that failed: a resumed run repeats it
        ends_run = event.reason == COMPLETED and self.is_last_train_epoch(trainer)
        if not ends_run or not window.count:
            return
        if window.count < window.divisor:
            if window.postpones_reduction(trainer):
                return  # FSDP2 reduces gradients over ranks only in the window's last backward pass
            window.rescale(trainer.model)
        self._step(trainer)

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Warn if accumulated gradients are left without a step."""
        window = self._window
        if window is not None and window.count and not trainer.stops.goes_back:
            if window.postpones_reduction(trainer):
                use = "FSDP2 keeps them on each rank, and only another train() of this trainer uses them"
            else:
                use = "a checkpoint saved now holds them, and a run resumed from it uses them"
            unused = f"the gradients of {window.count} iterations accumulated and not yet in a step"
            logger.warning("training ended (%s) with %s; %s", event.reason, unused, use)

    def _step(self, trainer: Trainer) -> None:
        """Clip and make the step, but skip it if losses are scaled and a gradient is not finite.

        Raises:
            RuntimeError: losses are scaled, and no parameter has a gradient.
        """
        precision, window = self._precision, self._window
        if precision is None or window is None or precision.scaler is None:
            self._clip_and_step(trainer)
            return
        found_inf = precision.unscale(precision.scaler, self._optimizers)
        if found_inf is None:
            window.count = 0
            raise RuntimeError(
                "backward left no gradient for any parameter of the optimizer, so there is nothing to step: "
                "compute the loss with the model whose parameters were passed to the optimizer"
            )
        try:
            if precision.scaling == "dynamic":
                trainer.metrics.put_scalar("loss_scale", precision.scaler.scale(torch.ones_like(found_inf)))
            # item() waits for the device. GradScaler.step would wait too, but does not tell whether it has
            # skipped the step. The gradients are unscaled, so optimizer.step() is right without the scaler.
            if found_inf.item():  # a gradient is not finite
                self._skip_step(trainer, window)
            else:
                self._clip_and_step(trainer)
        finally:
            if window.count:  # an error prevented the step: scale the gradients again, for a later step
                window.multiply_gradients(precision.scaler.get_scale())
                precision.scaler.update(precision.scaler.get_scale())
            else:
                precision.update(precision.scaler)

    def _skip_step(self, trainer: Trainer, window: Accumulation) -> None:
        """Drop the gradients, and emit `optimizer_step_skipped`."""
        window.count = 0
        trainer.within = trainer.within or "iter"
        window.allow_schedulers()
        start = perf_counter()
        trainer.announce(OptimizerStepSkipped, reason="non-finite gradients")
        self._other_seconds += perf_counter() - start

    def _clip_and_step(self, trainer: Trainer) -> None:
        """Clip the gradients and step the optimizers, with the events before and after the step."""
        if self._clip is not None:
            self._clip_gradients(trainer)
        wanted = self._wanted
        if wanted[BeforeOptimizerStep]:
            self._announce(trainer, BeforeOptimizerStep)
        copying = trainer.copying
        for optimizer in self._optimizers:
            if id(optimizer) not in copying.waited:  # a running save may still copy the weights
                copying.before_step(optimizer)
            optimizer.step()
            # within the loop: if a later optimizer fails, this step must not be made again
            if self._window is not None:
                self._window.count = 0
            trainer.within = trainer.within or "iter"  # it is "epoch" already at the end of an epoch
        if wanted[AfterOptimizerStep]:
            self._announce(trainer, AfterOptimizerStep)

    def settings(self) -> dict[str, Any]:
        """Return the options of clipping, accumulation and loss scaling."""
        clip = None if self._clip is None else self._clip.options
        settings = {"grad_clip": clip, "cumulative_iters": self.cumulative_iters}
        return settings if self._precision is None else {**settings, **self._precision.settings()}

    # --- saving and resuming -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the accumulated gradients, and in mixed precision the state of the `GradScaler`."""
        if self._window is None:
            return {}
        if self._precision is None:
            return self._window.state("none")
        return {**self._window.state(self._precision.scaling), "scaler": self._precision.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load saved accumulated gradients, and a saved loss scale.

        Raises:
            CheckpointError: `state` does not have the fields of this hook's state.
            ValueError: the checkpoint's run scaled its losses in another way, or the gradients do not fit the
                trainer's parameters.
        """
        if self._window is None:
            return
        name, precision = type(self).__name__, self._precision
        saved = read_as(SavedWindow, state, f"{name} cannot take its state")
        scaling = "none" if precision is None else precision.scaling
        if saved.loss_scaling != scaling:
            raise ValueError(
                f"the checkpoint's run had loss scaling {saved.loss_scaling!r}, this hook has "
                f"{scaling!r}: give the hook the loss_scale and dtype of that run, or load only "
                "the weights, with load_checkpoint"
            )
        self._window = self._window.loaded(saved)
        if precision is not None:
            precision.load(state, name)

    @on(priority=Priority.HIGHEST)
    def before_save_checkpoint(self, trainer: Trainer, event: BeforeSaveCheckpoint) -> None:
        """Store the accumulated gradients in the checkpoint as means over ranks, because rank 0 saves it."""
        window = self._window
        means = window.means(trainer.model) if window is not None and window.count else None
        if means is not None and trainer.checkpoint is not None:
            trainer.checkpoint["hooks"][self.name]["gradients"] = means

    def _set_optimizers(self, trainer: Trainer) -> None:
        """Store the trainer's optimizers as a list, and whether any parameter is a DTensor."""
        given = trainer.optimizer
        self._optimizers = [*named_optimizers(given).values()]
        if not self._optimizers:
            raise RuntimeError(
                "the optimizer hook has no optimizer to step: pass optimizer=... to the Trainer"
            )
        self._given = given
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        self._over_meshes = any_dtensor(chain(trainer.model.parameters(), *groups))
        if self._window is not None:
            self._window.use(given, self._optimizers)

    def _clip_gradients(self, trainer: Trainer) -> None:
        """Clip the gradients of each optimizer, and record the norm if it clips by norm."""
        assert self._clip is not None
        if not self._parameter_order:
            self._parameter_order = {each: index for index, each in enumerate(trainer.model.parameters())}
        for name, optimizer in named_values("grad_norm", self._given):
            norm = self._clip(optimizer, self._parameter_order, over_meshes=self._over_meshes)
            if norm is not None:
                trainer.metrics.put_scalar(name, norm)
