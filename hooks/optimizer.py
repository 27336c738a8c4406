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

    Events are emitted between these phases. With clipping by norm, the norm before clipping is recorded as
    the metric `grad_norm`; the training thread does not wait for its value.

    After the step the tensors of `trainer.outputs`, if that is a dict, are detached, so later handlers may
    call `float(trainer.outputs["loss"])`. A handler that needs their graph needs a priority below 30.

    With several optimizers, `optimizer=dict(generator=..., critic=...)`, the one loss trains all of them.
    Each is zeroed, clipped (`grad_norm/<name>`) and stepped on its own, in the mapping's order. For a loss
    per optimizer, or steps in turn, write a `train_step` that makes the steps, and pass
    `default_hooks=dict(optimizer=None)`.

    With `cumulative_iters` the hook works like `GradientCumulativeOptimizerHook`, and with `dtype` or
    `loss_scale` like `AmpOptimizerHook`; those two have the same options in another order.

    Args:
        grad_clip: keyword arguments of `torch.nn.utils.clip_grad_norm_` or, with type="value", of
            `clip_grad_value_`; applied to all parameters of an optimizer together, in the model's order.
            Parameters that no optimizer has are neither clipped nor in the norm.
        detect_anomalous_params: log the trainable parameters that the loss does not reach, in the first
            iteration and whenever the set changes. This walks the graph in every iteration, which is slow.
        cumulative_iters: iterations per optimizer step, or with `Trainer(unit="update")` batches; without it
            each iteration is a batch and has a step.
        loss_scale, dtype: see `AmpOptimizerHook`; without them the model is trained in its own types.

    Raises:
        TypeError, ValueError: `grad_clip` has an unknown type or argument, or lacks its bound; or another
            option is of the wrong type, unknown or out of range.
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
        plain = loss_scale is None and dtype is None
        self._precision = None if plain else MixedPrecision(loss_scale, dtype)
        self._window = None if plain and cumulative_iters is None else Accumulation(self.cumulative_iters)
        self._places: dict[Tensor, int] = {}  # of the model's parameters, for the order of the norm
        self._over_meshes = False
        self._anomalous = AnomalousParams() if detect_anomalous_params else None
        self._other_seconds = 0.0
        self._given: Any = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._wanted: Mapping[type[Event], bool] = {}

    @property
    def stateful(self) -> bool:
        """True when the hook accumulates gradients or scales losses, or a subclass has a state."""
        return self._window is not None or type(self).state_dict is not OptimizerHook.state_dict

    def check(self, trainer: Trainer) -> None:
        """Set `trainer.steps_in_hook`, because this hook steps the optimizer, not the train step.

        With accumulation it warns of BatchNorm layers, and stores the optimizers, which the gradients of a
        checkpoint need. In mixed precision it makes the `GradScaler`, which a checkpoint's state needs.

        Raises:
            RuntimeError: the device does not support autocast to the type.
            TypeError: an optimizer's step needs a closure, or FSDP1 shards the model, and a rank would clip
                or unscale by its own part alone.
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
        """Yield the methods with their events; the default hook is called once in an iteration."""
        for method, events in super()._subscriptions(bus):
            own = getattr(OptimizerHook, method.__name__, None) is getattr(method, "__func__", None)
            if self._window is not None or not own or method.__name__ == "after_train_iter":
                yield method, events

    # --- before the forward pass ---------------------------------------------------------------------------

    def before_run(self, trainer: Trainer, event: BeforeRun) -> None:
        """Choose the autocast type and the `GradScaler` again if the model was moved to another device."""
        if self._precision is not None:
            self._precision.prepare(trainer.model)

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Find the modules that FSDP2 shards, and store a checkpoint's gradients in the parameters."""
        if self._window is not None:
            self._window.open(trainer.model)

    @on(priority=Priority.LOWEST)
    def before_train_iter(self, trainer: Trainer, event: BeforeTrainIter) -> None:
        """Suspend the exchange of gradients in an iteration without a step, and enter autocast."""
        if self._window is not None:
            self._window.suspend_exchange(trainer)
        if self._precision is not None:
            self._precision.begin_forward()

    # --- backward and the step -----------------------------------------------------------------------------

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Run backward, clip the gradients and step the optimizers; or add the gradients to the window's.

        In an iteration of several batches, backward was run on each of them.

        Raises:
            TypeError: `trainer.outputs` holds no loss tensor.
            RuntimeError: the loss needs no grad, its graph is freed, or the trainer has no optimizer.
        """
        clock, window = trainer.clock, self._window
        device, began = clock.device, perf_counter() - clock.excluded
        self._other_seconds = backward = 0.0
        if window is not None and trainer.counting.accumulator is self:
            window.complete(trainer)
            steps = True
        else:
            clock.backward = backward = self._run_backward(trainer)
            steps = window is None or window.ends(trainer)
            if self._wanted[AfterBackward]:
                self._announce(trainer, AfterBackward)
        if steps and self._precision is None:
            self._clip_and_step(trainer)
        elif steps:
            self._step(trainer)
        if device is not None:
            device.mark(OPTIMIZER_ENDS)
        trainer.outputs = detached(trainer.outputs)
        clock.optimizer = perf_counter() - clock.excluded - began - backward - self._other_seconds

    def _run_backward(self, trainer: Trainer) -> float:
        """Run backward on the loss of a batch, and return its seconds; a window begins with zero_grad."""
        if trainer.optimizer is not self._given or self._given is None:
            self._set_optimizers(trainer)
        loss, window, clock = loss_of(trainer.outputs), self._window, trainer.clock
        if window is None or not window.count:
            if window is not None:
                window.divisor = window.length(trainer)
            for optimizer in self._optimizers:
                optimizer.zero_grad(set_to_none=True)
        if self._anomalous is not None:
            self._anomalous.check(loss, trainer.model)
        began = perf_counter() - clock.excluded
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
        seconds = perf_counter() - clock.excluded - began
        if clock.device is not None:
            clock.device.mark(BACKWARD_ENDS)
        return seconds

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Step with the accumulated gradients when the last epoch ended within a window."""
        window = self._window
        if window is None:
            return
        if self._precision is not None:
            self._precision.end_forward()  # still open after a failed forward pass, or a skipped batch
        window.resume_exchange()
        if trainer.counting.accumulator is self:
            window.count = 0  # gradients of an iteration that an error ended, which is done again
        if window.count and event.reason == COMPLETED and self.is_last_train_epoch(trainer):
            if window.count < window.divisor:
                if window.postpones_reduction(trainer):
                    return  # FSDP2 reduces gradients only in the backward of the window's last iteration
                window.rescale(trainer.model)
            self._step(trainer)

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Warn if accumulated gradients are left without a step."""
        window = self._window
        if window is not None and window.count and not trainer.stops.goes_back:
            keeper = (
                "FSDP2 keeps them on each rank, and only another train() of this trainer uses them"
                if window.postpones_reduction(trainer)
                else "a checkpoint saved now holds them, and a run resumed from it uses them"
            )
            left = f"the gradients of {window.count} iterations accumulated and not yet in a step"
            logger.warning("training ended (%s) with %s; %s", event.reason, left, keeper)

    def _step(self, trainer: Trainer) -> None:
        """Step with the gradients, unless losses are scaled and a gradient is not finite.

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
            # the step's only wait for the device; GradScaler.step would wait after clipping and return no
            # result. The gradients are unscaled by now, so finite ones only need optimizer.step()
            if found_inf.item():
                self._skip_step(trainer, window)
            else:
                self._clip_and_step(trainer)
        finally:
            if window.count:  # an error prevented the step, which is retried later, with scaled gradients
                window.multiply_gradients(precision.scaler.get_scale())
                precision.scaler.update(precision.scaler.get_scale())
            else:
                precision.update(precision.scaler)

    def _skip_step(self, trainer: Trainer, window: Accumulation) -> None:
        window.count = 0
        trainer.within = trainer.within or "iter"
        window.allow_schedulers()
        began = perf_counter()
        trainer.announce(OptimizerStepSkipped, reason="non-finite gradients")
        self._other_seconds += perf_counter() - began

    def _clip_and_step(self, trainer: Trainer) -> None:
        """Clip the gradients and step; after an error before the step, only the step is repeated."""
        if self._clip is not None:
            self._clip_gradients(trainer)
        wanted = self._wanted
        if wanted[BeforeOptimizerStep]:
            self._announce(trainer, BeforeOptimizerStep)
        copying = trainer.copying
        for optimizer in self._optimizers:
            if id(optimizer) not in copying.waited:
                copying.before_step(optimizer)
            optimizer.step()
            # set even if a later optimizer's step fails: this step is not made twice
            if self._window is not None:
                self._window.count = 0
            trainer.within = trainer.within or "iter"  # "epoch" for the step at the end of an epoch
        if wanted[AfterOptimizerStep]:
            self._announce(trainer, AfterOptimizerStep)

    def settings(self) -> dict[str, Any]:
        """Return the options of clipping, accumulation and loss scaling."""
        clip = None if self._clip is None else self._clip.options
        own = {"grad_clip": clip, "cumulative_iters": self.cumulative_iters}
        return own if self._precision is None else {**own, **self._precision.settings()}

    # --- saving and resuming -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the unfinished window with its gradients, and in mixed precision the scaler's state."""
        if self._window is None:
            return {}
        if self._precision is None:
            return self._window.state("none")
        return {**self._window.state(self._precision.scaling), "scaler": self._precision.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the saved gradients of an unfinished window, and a saved loss scale.

        Raises:
            CheckpointError: `state` does not have the fields of this hook's state.
            ValueError: the losses were scaled in another way, or the gradients do not fit the trainer's
                parameters.
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
        """Save an unfinished window's gradients as means over ranks, so that all ranks can resume."""
        window = self._window
        means = window.means(trainer.model) if window is not None and window.count else None
        if means is not None and trainer.checkpoint is not None:
            trainer.checkpoint["hooks"][self.name]["gradients"] = means

    def _set_optimizers(self, trainer: Trainer) -> None:
        """Store the trainer's optimizers, one or several, as a list, and whether gradients are DTensors."""
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
        assert self._clip is not None
        if not self._places:
            self._places = {each: place for place, each in enumerate(trainer.model.parameters())}
        for name, optimizer in named_values("grad_norm", self._given):
            norm = self._clip(optimizer, self._places, over_meshes=self._over_meshes)
            if norm is not None:
                trainer.metrics.put_scalar(name, norm)
