"""Clip and unscale the gradients of DTensors on different device meshes, and of plain tensors, together.

PyTorch's own functions refuse such gradients, as tensor parallelism of some layers makes them: a foreach
operation takes tensors of one mesh. The optimizer hook uses this only if a parameter is a DTensor. All
functions are collectives: each rank of the training calls them for the same parameters.
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
    """Clip by the norm of all gradients, as `clip_grad_norm_` does in one process; return a plain tensor.

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
    meshes: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if is_dtensor(gradient) else None  # type: ignore[attr-defined]
        meshes.setdefault(mesh, []).append(gradient)
    norms = [_whole(get_total_norm(group, norm_type, foreach=foreach)) for group in meshes.values()]
    if len(norms) == 1:
        return norms[0]
    total: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type
    )
    return total


def _largest(parts: Sequence[Tensor], foreach: bool | None) -> Tensor:
    """Return the largest absolute value of all ranks' parts; NaN if one of them has a NaN.

    PyTorch's norm of infinite order refuses a DTensor of which a rank holds nothing, as of one with fewer
    rows than ranks.
    """
    held = [part for part in parts if part.numel()]
    own = (
        get_total_norm(held, torch.inf, foreach=foreach) if held else torch.zeros((), device=parts[0].device)
    )
    found = torch.stack([own, own.isnan().to(own.dtype)]).float()
    dist.all_reduce(found, dist.ReduceOp.MAX)  # of NaN and a number it may return the number
    return torch.where(found[1] > 0, torch.nan, found[0])


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
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = local_tensors(_placed_gradients(parameters))
        if not allow_fp16 and any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError(
                "the gradients to unscale must be float32, got float16: leave the parameters in float32, "
                "autocast casts them"
            )
        found = found_inf.clone()
        for (device, _), tensors in _by_device_and_type(gradients):
            here = torch.zeros_like(found_inf, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, here, inv_scale.to(device))
            found += here.to(found.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return {found.device: found} if gradients else {}


@torch.no_grad()
def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the part of each DTensor that this rank holds, which shares its memory, and plain tensors."""
    return [
        tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
        for tensor in tensors
    ]


@torch.no_grad()
def _placed_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients, placed like their parameters.

    A gradient may be a sum that is still to be made over ranks (Partial), as that of a norm's weight under
    sequence parallelism. The optimizer's step would make it; a value can be clipped only afterwards.
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
    """Return tensors by device and type, as the foreach operations need them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds.items()
