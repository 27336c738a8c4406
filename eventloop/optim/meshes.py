"""Clip and unscale gradients that are DTensors of several device meshes, or plain tensors.

A DTensor is divided over a mesh of ranks. If tensor parallelism divides only some layers, the gradients
belong to different meshes, and PyTorch's own functions refuse them: a foreach operation takes tensors of one
mesh. The optimizer hook uses this module only if a parameter is a DTensor. All functions are collectives:
each rank of the training calls them for the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from eventloop.state.sharded import is_dtensor


def any_dtensor(parameters: Iterable[Tensor]) -> bool:
    """Return whether one of the parameters is a DTensor."""
    return any(map(is_dtensor, parameters))


def clip_norm_over_meshes(
    parameters: Sequence[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip by the norm of all gradients, as `clip_grad_norm_` does in one process.

    Args:
        parameters: the parameters, which may have no gradients.
        max_norm, norm_type, error_if_nonfinite, foreach: see `clip_grad_norm_`.

    Returns:
        The norm before clipping, as a plain tensor.

    Raises:
        RuntimeError: `error_if_nonfinite` is set, and the norm is not finite.
    """
    gradients = _placed_gradients(parameters)
    if not gradients:
        return torch.tensor(0.0)
    if norm_type == torch.inf:
        total = _largest(local_tensors(gradients), foreach)
    else:
        total = _total_norm(gradients, norm_type, foreach)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, and error_if_nonfinite=True "
            "allows only a finite one: leave it out to clip by such a norm"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # the formula of clip_grad_norm_
    for (device, _), tensors in _by_device_and_type(local_tensors(gradients)):
        torch._foreach_mul_(tensors, factor.to(device))
    return total


def _total_norm(gradients: Sequence[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    """Return the norm of all gradients, computed for each mesh and then of these norms."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if is_dtensor(gradient) else None  # type: ignore[attr-defined]
        by_mesh.setdefault(mesh, []).append(gradient)
    norms = [_whole(get_total_norm(of_mesh, norm_type, foreach=foreach)) for of_mesh in by_mesh.values()]
    if len(norms) == 1:
        return norms[0]
    total: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type
    )
    return total


def _largest(parts: Sequence[Tensor], foreach: bool | None) -> Tensor:
    """Return the largest absolute value in the parts of all ranks; NaN if one of them has a NaN.

    PyTorch's norm of infinite order refuses a DTensor of which a rank holds nothing, for example because it
    has fewer rows than there are ranks.

    Args:
        parts: the parts of the gradients that this rank holds.
    """
    not_empty = [part for part in parts if part.numel()]
    own = (
        get_total_norm(not_empty, torch.inf, foreach=foreach)
        if not_empty
        else torch.zeros((), device=parts[0].device)
    )
    # the maximum of a NaN and a number may be the number, so whether there is a NaN is exchanged as well
    largest = torch.stack([own, own.isnan().to(own.dtype)]).float()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return torch.where(largest[1] > 0, torch.nan, largest[0])


def clip_value_over_meshes(
    parameters: Sequence[Tensor], clip_value: float, foreach: bool | None = None
) -> None:
    """Limit each element of the gradients to the range from -clip_value to clip_value."""
    for gradient in local_tensors(_placed_gradients(parameters)):
        gradient.clamp_(-clip_value, clip_value)


class MeshGradScaler(torch.amp.GradScaler):
    """A `GradScaler` for gradients of several meshes: all ranks make the step, or none does."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale the gradients of each mesh; all ranks learn whether any gradient is not finite."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = local_tensors(_placed_gradients(parameters))
        if not allow_fp16 and any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError(
                "the gradients to unscale must be float32, got float16: leave the parameters in float32, "
                "autocast casts them"
            )
        is_infinite = found_inf.clone()  # above 0 if a gradient is not finite
        for (device, _), tensors in _by_device_and_type(gradients):
            on_device = torch.zeros_like(found_inf, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, on_device, inv_scale.to(device))
            is_infinite += on_device.to(is_infinite.device)
        dist.all_reduce(is_infinite, dist.ReduceOp.MAX)
        return {is_infinite.device: is_infinite} if gradients else {}


@torch.no_grad()
def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's part of each DTensor, in the same memory, and plain tensors as they are."""
    return [
        tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
        for tensor in tensors
    ]


@torch.no_grad()
def _placed_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters, divided over the ranks like the parameters.

    Each rank may hold a summand of a gradient (a `Partial` placement), as under sequence parallelism for the
    weight of a normalisation layer. The optimizer's step would compute the sum, but only the sum can be
    clipped, so it is computed here.
    """
    gradients = []
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is None:
            continue
        if is_dtensor(parameter) and is_dtensor(gradient) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
            parameter.grad = gradient
        gradients.append(gradient)
    return gradients


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if is_dtensor(norm) else norm  # type: ignore[attr-defined]


def _by_device_and_type(
    tensors: Iterable[Tensor],
) -> Iterable[tuple[tuple[torch.device, torch.dtype], list[Tensor]]]:
    """Return tensors grouped by device and type, because a foreach operation takes tensors of one kind."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups.items()
