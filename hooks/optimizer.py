"""The hook that runs backward and the optimizer's step in each training iteration."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eventloop.costs.step_clock import BACKWARD_BEGINS, BACKWARD_ENDS, OPTIMIZER_ENDS
from eventloop.events import AfterBackward, AfterOptimizerStep, AfterTrainIter, BeforeOptimizerStep, Event
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook
from eventloop.migration.names import knowing_others
from eventloop.model.unused_parameters import AnomalousParams
from eventloop.optim.clipping import GradClip
from eventloop.optim.optimizers import named_optimizers, named_values
from eventloop.util.checks import check_bools

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer


StepEvent = AfterBackward | BeforeOptimizerStep | AfterOptimizerStep

_STEPS_ITSELF = (
    "A train_step or loop that calls backward() and step() itself needs default_hooks=dict(optimizer=None)"
)


class OptimizerHook(Hook):
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

    Args:
        grad_clip: keyword arguments of `torch.nn.utils.clip_grad_norm_` or, with type="value", of
            `clip_grad_value_`; applied to all parameters of an optimizer together, in the model's order.
            Parameters that no optimizer has are neither clipped nor in the norm.
        detect_anomalous_params: log the trainable parameters that the loss does not reach, in the first
            iteration and whenever the set changes. This walks the graph in every iteration, which is slow.

    Raises:
        TypeError, ValueError: `grad_clip` has an unknown type or argument, or lacks its bound; or
            `detect_anomalous_params` is not a bool.
    """

    priority = Priority.HIGH
    owns = "backward and the optimizer's step"
    runs_phases = ("backward", "optimizer")

    @knowing_others
    def __init__(
        self, grad_clip: Mapping[str, Any] | None = None, detect_anomalous_params: bool = False
    ) -> None:
        check_bools(detect_anomalous_params=detect_anomalous_params)
        self._clip = None if grad_clip is None else GradClip(grad_clip)
        self._places: dict[Tensor, int] = {}  # of the model's parameters, for the order of the norm
        self._anomalous = AnomalousParams() if detect_anomalous_params else None
        self._other_seconds = 0.0  # seconds that other handlers took within this hook's call
        self._count = 0
        """Iterations whose gradients wait for the step, within a window of several iterations."""
        self._given: Any = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._wanted: Mapping[type[Event], bool] = {}

    def check(self, trainer: Trainer) -> None:
        """Set `trainer.steps_in_hook`, because this hook steps the optimizer, not the train step."""
        trainer.steps_in_hook = True
        self._wanted = trainer.bus.wanted(AfterBackward, BeforeOptimizerStep, AfterOptimizerStep)

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Run backward, clip the gradients and step the optimizers.

        Raises:
            TypeError: `trainer.outputs` holds no loss tensor.
            RuntimeError: the loss needs no grad, its graph is freed, or the trainer has no optimizer.
        """
        clock = trainer.clock
        device, began = clock.device, perf_counter() - clock.excluded
        if trainer.optimizer is not self._given or self._given is None:
            self._set_optimizers(trainer.optimizer)
        loss = loss_of(trainer.outputs)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self._anomalous is not None:
            self._anomalous.check(loss, trainer.model)
        self._other_seconds = 0.0
        backward = perf_counter() - clock.excluded
        if device is not None:
            device.mark(BACKWARD_BEGINS)
        try:
            loss.backward()
        except RuntimeError as error:
            explain_freed_graph(error)
            raise
        clock.backward = perf_counter() - clock.excluded - backward
        if device is not None:
            device.mark(BACKWARD_ENDS)
        if self._wanted[AfterBackward]:
            self._announce(trainer, AfterBackward)
        self._step(trainer)
        if device is not None:
            device.mark(OPTIMIZER_ENDS)
        trainer.outputs = detached(trainer.outputs)
        clock.optimizer = perf_counter() - clock.excluded - began - clock.backward - self._other_seconds

    def _step(self, trainer: Trainer) -> None:
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
            self._count = 0
            trainer.within = trainer.within or "iter"  # "epoch" for the step at the end of an epoch
        if wanted[AfterOptimizerStep]:
            self._announce(trainer, AfterOptimizerStep)

    def _announce(self, trainer: Trainer, event_type: type[StepEvent]) -> None:
        """Emit an event of the step, and leave its handlers' time out of the step's time."""
        clock = trainer.clock
        began = perf_counter() - clock.excluded
        # `trainer.announce` without its check for subscribers, which costs 10 us for three events a step
        event = event_type(
            iter=trainer.iter, epoch=trainer.epoch, max_iters=trainer.max_iters, max_epochs=trainer.max_epochs
        )
        trainer.bus.emit(event, trainer)
        self._other_seconds += perf_counter() - clock.excluded - began

    def settings(self) -> dict[str, Any]:
        """Return how gradients are clipped, and the iterations per step."""
        return {"grad_clip": None if self._clip is None else self._clip.options, "cumulative_iters": 1}

    def _set_optimizers(self, given: Any) -> None:
        """Store the trainer's optimizers, one or several, as a list."""
        self._optimizers = [*named_optimizers(given).values()]
        if not self._optimizers:
            raise RuntimeError(
                "the optimizer hook has no optimizer to step: pass optimizer=... to the Trainer"
            )
        self._given = given

    def _clip_gradients(self, trainer: Trainer) -> None:
        assert self._clip is not None
        if not self._places:
            self._places = {each: place for place, each in enumerate(trainer.model.parameters())}
        for name, optimizer in named_values("grad_norm", self._given):
            norm = self._clip(optimizer, self._places)
            if norm is not None:
                trainer.metrics.put_scalar(name, norm)


def loss_of(outputs: Any) -> torch.Tensor:
    """Return the loss tensor of a train step, ready for backward.

    Raises:
        TypeError: `outputs` is not a mapping with a "loss" tensor of one element.
        RuntimeError: the loss needs no grad.
    """
    loss = outputs.get("loss") if type(outputs) is dict or isinstance(outputs, Mapping) else None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        if isinstance(loss, torch.Tensor):
            got = f"a loss of shape {tuple(loss.shape)}: take its mean()"
        else:
            got = f"{outputs!r}{f'. {_STEPS_ITSELF}' if isinstance(loss, int | float) else ''}"
        raise TypeError(
            "expected trainer.outputs to be a mapping with a 'loss' tensor of one element, set in this "
            f"iteration; got {got}"
        )
    if not loss.requires_grad:
        raise RuntimeError(
            "the loss needs no grad, so backward would train nothing: was it computed under torch.no_grad(), "
            f"detached, or are all parameters frozen? {_STEPS_ITSELF}"
        )
    return loss


def explain_freed_graph(error: RuntimeError) -> None:
    """Add the cause and the remedy to PyTorch's error about a second backward through one graph."""
    if "backward through the graph a second time" in str(error):
        error.add_note(
            f"The optimizer hook calls backward() on trainer.outputs['loss']. {_STEPS_ITSELF}. Call detach() "
            "on a tensor that is kept from an earlier iteration, such as a recurrent state."
        )


def detached(outputs: Any) -> Any:
    """Return a copy of a dict with its tensors detached from their graph; return other objects unchanged.

    A mapping of another class is returned unchanged, because a copy as a dict would lose its attributes.
    """
    if type(outputs) is not dict:
        return outputs
    kept = outputs.copy()
    for name, value in outputs.items():
        # the exact type first: `isinstance` runs a metaclass's check, which is slower
        if (type(value) is Tensor or isinstance(value, Tensor)) and value.requires_grad:
            kept[name] = value.detach()
    return kept
