"""Backward and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from eventloop.catalogue import suggest
from eventloop.events import AfterBackward, AfterOptimizerStep, AfterTrainIter, BeforeOptimizerStep
from eventloop.hooks.hook import Hook
from eventloop.priority import Priority

if TYPE_CHECKING:
    from eventloop.trainer import Trainer

_CLIP_ARGUMENTS = {
    "norm": ("max_norm", "norm_type", "error_if_nonfinite", "foreach"),
    "value": ("clip_value", "foreach"),
}


class OptimizerHook(Hook):
    """After each forward pass: zero_grad, backward, clip, step, with the events between them.

        OptimizerHook(grad_clip=dict(max_norm=35, norm_type=2))          # mmcv's form
        OptimizerHook(grad_clip=dict(type="value", clip_value=0.5))      # MMEngine's form

    With clipping by norm, the norm before clipping is put as the metric `grad_norm`, without reading it.

    Args:
        grad_clip: keyword arguments of `torch.nn.utils.clip_grad_norm_` or, with type="value", of
            `clip_grad_value_`; over all parameters of the optimizer together.

    Raises:
        TypeError, ValueError: `grad_clip` has an unknown type or argument, or lacks its bound.
    """

    priority = Priority.HIGH

    def __init__(self, grad_clip: Mapping[str, Any] | None = None) -> None:
        self._clip, self._clip_arguments = parse_grad_clip(grad_clip)

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Do the step.

        Raises:
            TypeError: `trainer.outputs` holds no loss tensor.
            RuntimeError: the loss needs no grad, or the trainer has no optimizer.
        """
        clock, began, excluded = trainer.clock, perf_counter(), trainer.clock.excluded
        optimizer = trainer.optimizer
        if optimizer is None:
            raise RuntimeError(
                "the optimizer hook has no optimizer to step: pass optimizer=... to the Trainer"
            )
        loss = loss_of(trainer.outputs)
        wants = trainer.bus.wants
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if wants(AfterBackward):
            trainer.announce(AfterBackward)
        if self._clip is not None:
            self._clip_gradients(trainer, optimizer)
        if wants(BeforeOptimizerStep):
            trainer.announce(BeforeOptimizerStep)
        optimizer.step()
        if wants(AfterOptimizerStep):
            trainer.announce(AfterOptimizerStep)
        clock.optimize = perf_counter() - began - (clock.excluded - excluded)

    def _clip_gradients(self, trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
        parameters = list(_parameters(optimizer))
        if self._clip == "value":
            clip_grad_value_(parameters, **self._clip_arguments)
        else:
            norm = clip_grad_norm_(parameters, **self._clip_arguments)
            trainer.metrics.put_scalar("grad_norm", norm)


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss of a step, ready for backward.

    Raises:
        TypeError: there is none, or it is no tensor of one element.
        RuntimeError: it needs no grad.
    """
    loss = outputs.get("loss") if type(outputs) is dict or isinstance(outputs, Mapping) else None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TypeError(
            "expected trainer.outputs to be a mapping with a 'loss' tensor of one element, set in this iteration; "
            f"got {outputs!r}"
        )
    if not loss.requires_grad:
        raise RuntimeError(
            "the loss needs no grad, so backward would train nothing: was it computed under torch.no_grad(), "
            "detached, or are all parameters frozen?"
        )
    return loss


def parse_grad_clip(grad_clip: Mapping[str, Any] | None) -> tuple[str | None, dict[str, Any]]:
    """Check clipping options; return ("norm" | "value" | None, arguments).

    Raises:
        TypeError, ValueError: see the message.
    """
    if grad_clip is None:
        return None, {}
    if not isinstance(grad_clip, Mapping):
        raise TypeError(f"grad_clip must be a dict such as dict(max_norm=35), got {grad_clip!r}")
    arguments = dict(grad_clip)
    kind = arguments.pop("type", "value" if "clip_value" in arguments else "norm")
    if kind not in _CLIP_ARGUMENTS:
        raise ValueError(f"unknown grad_clip type {kind!r}{suggest(str(kind), [*_CLIP_ARGUMENTS])}")
    for key in arguments:
        if key not in _CLIP_ARGUMENTS[kind]:
            raise ValueError(f"grad_clip has no argument {key!r}{suggest(key, [*_CLIP_ARGUMENTS[kind]])}")
    bound = _CLIP_ARGUMENTS[kind][0]
    limit = arguments.get(bound)
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        raise ValueError(f"grad_clip by {kind} needs {bound} above 0, got {dict(grad_clip)!r}")
    return kind, arguments


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
