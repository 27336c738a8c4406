"""Clip gradients by norm or by value, for the optimizer hooks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from eventloop.optim.meshes import clip_norm_over_meshes, clip_value_over_meshes
from eventloop.util.checks import check_choice, check_keys

_ARGUMENTS = {
    "norm": ("max_norm", "norm_type", "error_if_nonfinite", "foreach"),
    "value": ("clip_value", "foreach"),
}
"""The arguments of each type of clipping, the limit first."""


class GradClip:
    """Clip the gradients of an optimizer's parameters, over all its param groups together.

        clip = GradClip(dict(max_norm=35, norm_type=2))
        norm = clip(optimizer)          # 0-dim tensor, the norm before clipping

    The norm of all the optimizer's parameters is computed. The summands are in the order of the model's
    parameters, because a floating-point sum depends on the order: so the result has the same bits as
    `clip_grad_norm_(model.parameters(), ...)` if the optimizer has all parameters of the model. If parameters
    are DTensors (FSDP2, tensor parallelism), it is the norm of the whole tensors, not of this rank's parts.

    Args:
        options: keyword arguments of `torch.nn.utils.clip_grad_norm_` or, with type="value", of
            `clip_grad_value_`.

    Raises:
        TypeError, ValueError: `options` has an unknown type or argument, or lacks the limit of the clipping.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._kind, self._arguments = _parse(options)

    @property
    def options(self) -> dict[str, Any]:
        """Return the type ("norm" or "value") and the arguments of the clipping."""
        return {"type": self._kind, **self._arguments}

    @property
    def by_norm(self) -> bool:
        """True if gradients are clipped by their norm, False if by value."""
        return self._kind == "norm"

    def __call__(
        self,
        optimizer: torch.optim.Optimizer,
        places: Mapping[torch.Tensor, int] = MappingProxyType({}),
        *,
        over_meshes: bool = False,
    ) -> torch.Tensor | None:
        """Clip the gradients; return their norm before clipping, or None with type="value".

        No value of a tensor is read, so the host does not wait for the device.

        Args:
            optimizer: the optimizer.
            places: the index of each parameter in `model.parameters()`, for the order of the sum; parameters
                without one come last.
            over_meshes: whether a parameter is a DTensor; then the call is a collective.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        parameters.sort(key=lambda parameter: places.get(parameter, len(places)))
        if self._kind == "norm":
            clip_norm = clip_norm_over_meshes if over_meshes else clip_grad_norm_
            norm: torch.Tensor = clip_norm(parameters, **self._arguments)
            return norm
        clip_value = clip_value_over_meshes if over_meshes else clip_grad_value_
        clip_value(parameters, **self._arguments)
        return None


class TunableClip:
    """A base class for hooks with a `GradClip` in `_clip`, whose largest norm a command may set."""

    tunable: ClassVar[tuple[str, ...]] = ("max_norm",)
    _clip: GradClip | None

    @property
    def max_norm(self) -> float:
        """The largest norm of the gradients; AttributeError is raised if the hook does not clip by norm."""
        if self._clip is None or not self._clip.by_norm:
            raise AttributeError("the hook does not clip by norm")
        return float(self._clip.options["max_norm"])

    @max_norm.setter
    def max_norm(self, max_norm: float) -> None:
        if self._clip is None or not self._clip.by_norm:
            raise AttributeError("the hook does not clip by norm")
        self._clip = GradClip({**self._clip.options, "max_norm": max_norm})


def _parse(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Check the options of a clipping; return "norm" or "value", and the arguments of PyTorch's function."""
    if not isinstance(options, Mapping):
        raise TypeError(f"grad_clip must be a dict such as dict(max_norm=35), got {options!r}")
    arguments = dict(options)
    kind = arguments.pop("type", "value" if "clip_value" in arguments else "norm")
    check_choice("the type of grad_clip", kind, _ARGUMENTS)
    check_keys("grad_clip", arguments, _ARGUMENTS[kind])
    limit_name = _ARGUMENTS[kind][0]
    limit = arguments.get(limit_name)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float)):
        raise TypeError(f"grad_clip: {limit_name} must be a number, got {limit!r}")
    if limit is None or not limit > 0:
        raise ValueError(f"grad_clip by {kind} needs {limit_name} above 0, got {dict(options)!r}")
    return str(kind), arguments
