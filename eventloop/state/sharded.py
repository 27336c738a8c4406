"""Handle tensors that are sharded over ranks: each rank holds a part of the whole tensor.

FSDP2 and tensor parallelism make such tensors, as DTensors. Metrics and the states of hooks refuse them,
because they would silently hold one rank's part. A load fills each rank's part from the whole tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

GATHER = "Gather it first: full_tensor(), called on all ranks."
NO_SHARDS_THERE = (
    "A checkpoint has DTensors in state_dict, ema_state_dict and optimizer only: save what full_tensor() "
    "gathers, called on all ranks."
)
FULLY_SHARD = "Shard models by fully_shard of torch.distributed.fsdp (FSDP2)."

NO_CHECKPOINT = f"{FULLY_SHARD} Without checkpoints it trains: default_hooks=dict(checkpoint=None)."


def is_sharded(value: object) -> bool:
    """Return whether `value` is a DTensor or a ShardedTensor, without importing their modules."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return False
    return is_dtensor(value) or isinstance(value, _class(*_SHARDED))


def is_dtensor(value: object) -> bool:
    """Return whether `value` is a DTensor, without importing its module."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def local_part(value: Any) -> Any:
    """Return this rank's part of a DTensor, in the same memory, and any other value as it is."""
    return local_parts([value])[0] if is_dtensor(value) else value


@torch.no_grad()
def part_of(full: torch.Tensor, like: DTensor) -> DTensor:
    """Return a DTensor laid out as `like`, with this rank's part of `full` in host memory.

    All ranks hold `full`, so none waits for another one.

    Args:
        full: the whole tensor, of the shape of `like`.
        like: a DTensor, which says how the tensor is divided, and over which ranks: its mesh.
    """
    part = cast("DTensor", torch.empty_like(like.detach(), dtype=full.dtype, device="cpu"))
    mesh = like.device_mesh
    if (place := mesh.get_coordinate()) is None:
        return part  # a rank outside of the mesh holds nothing
    part.to_local().copy_(divided(full, like.placements, mesh.shape, place))
    return part


def divided(
    full: torch.Tensor, placements: Sequence[Any], mesh_shape: Sequence[int], place: Sequence[int]
) -> torch.Tensor:
    """Return the part of a tensor that a rank holds.

    PyTorch has a function for this, `compute_local_shape_and_global_offset`. In some versions it returned
    wrong rows for a `_StridedShard` with parts of unequal size.

    Args:
        full: the whole tensor.
        placements, mesh_shape: how the tensor is divided over each dimension of the mesh of ranks, and the
            number of ranks in that dimension.
        place: the coordinate of the rank in the mesh.
    """
    for ranks, number, placement in zip(mesh_shape, place, placements, strict=True):
        if placement.is_replicate():
            continue
        # with tensor parallelism, FSDP2 divides each of its parts (a _StridedShard), not the whole tensor
        dim, parts = placement.dim, getattr(placement, "split_factor", 1)
        pieces = [_chunk(full, parts, part, dim) for part in range(parts)]
        full = torch.cat([_chunk(piece, ranks, number, dim) for piece in pieces], dim)
    return full


def _chunk(tensor: torch.Tensor, chunks: int, number: int, dim: int) -> torch.Tensor:
    """Return chunk `number` of a tensor divided as by `torch.chunk`; the last chunks may be empty."""
    size = -(-tensor.size(dim) // chunks)
    start = min(number * size, tensor.size(dim))
    return tensor.narrow(dim, start, min(size, tensor.size(dim) - start))


def refuse_old_shards(what: str, model: torch.nn.Module, advice: str = FULLY_SHARD) -> None:
    """Raise TypeError if FSDP1 wraps a part of `model`, or one of its parameters is a ShardedTensor.

    Args:
        what: the feature that would use one rank's part as the whole model; it begins the message.
        advice: the end of the message.
    """
    fsdp1, sharded = _class(*_FSDP1), _class(*_SHARDED)
    for name, module in model.named_modules():
        if isinstance(module, fsdp1):
            raise TypeError(
                f"{what}: the module {name!r} of the model is sharded over ranks: expected plain "
                f"parameters or DTensors, got a {type(module).__name__}. {advice}"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, sharded):
            refuse_sharded(f"{what}: {name!r} of the model", parameter, advice)


def refuse_sharded(where: str, value: Any, advice: str = GATHER) -> None:
    """Raise TypeError if `value` is sharded over ranks.

    Args:
        where: the name of the value, which begins the message.
        advice: the last sentence of the message.
    """
    if is_sharded(value):
        placements = f", placements {value.placements}" if hasattr(value, "placements") else ""
        raise TypeError(
            f"{where} is sharded over ranks: expected a plain tensor, got a {type(value).__name__} of shape "
            f"{tuple(value.shape)}{placements}. {advice}"
        )


def gathers_weights(model: torch.nn.Module) -> bool:
    """Return whether a forward pass of `model` needs all ranks, because each holds a part of the weights."""
    return any(map(is_sharded, model.parameters())) or is_wrapped_by_fsdp(model)


def is_wrapped_by_fsdp(model: torch.nn.Module) -> bool:
    """Return whether FSDP1 or FSDP2 shards a module of `model`."""
    kinds = _class(*_FSDP1), _class(*_FSDP2)
    return any(isinstance(each, kinds) for each in model.modules())


def fsdp_modules(model: torch.nn.Module) -> list[Any]:
    """Return the modules of `model` to which FSDP2's `fully_shard` was applied."""
    fsdp2 = _class(*_FSDP2)
    return [module for module in model.modules() if isinstance(module, fsdp2)] if fsdp2 else []


def reshard(model: torch.nn.Module) -> None:
    """Free the weights that FSDP2 has gathered, so that each rank holds only its own part of them.

    After an evaluation the weights of the outermost module stay gathered, and later forward passes would use
    them although the parts have changed. FSDP2's own `reshard` does nothing after a forward pass that raised
    an error, but `state_dict` always frees the gathered weights.
    """
    if fsdp_modules(model):
        torch.nn.Module.state_dict(model, keep_vars=True)


def local_parts(tensors: Iterable[Any]) -> list[Any]:
    """Return this rank's part of each DTensor, in the same memory, and other values as they are."""
    with torch.no_grad():  # here `to_local` returns the part itself, which takes a tenth of the time
        return [each.to_local() if is_dtensor(each) else each for each in tensors]


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the whole shape of a tensor, and for a DTensor also how it is divided over ranks."""
    placed = (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else ()  # type: ignore[attr-defined]
    return (tensor.shape, *placed)


_SHARDED = "torch.distributed._shard.sharded_tensor", "ShardedTensor"
_FSDP1 = "torch.distributed.fsdp", "FullyShardedDataParallel"
_FSDP2 = "torch.distributed.fsdp", "FSDPModule"


def _class(module: str, name: str) -> Any:
    """Return a class of torch.distributed, or () if its module is not imported and so has no instances."""
    return getattr(sys.modules.get(module), name, ())
