"""Find how many ranks read different data: with tensor parallelism several ranks share each batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from eventloop.assembly.attach import rank_and_world_size
from eventloop.data.loader_state import samplers_of
from eventloop.state.sharded import gathers_weights, is_dtensor, is_wrapped_by_fsdp
from eventloop.util.checks import positive


def find_ranks(
    given: int | None, model: torch.nn.Module, loader: Iterable[Any] | None
) -> tuple[int, int, int]:
    """Return this process's rank, the number of ranks, and how many ranks read different data."""
    rank, world_size = rank_and_world_size()
    return rank, world_size, find_data_ranks(given, model, loader, world_size)


def find_data_ranks(
    given: int | None, model: torch.nn.Module, loader: Iterable[Any] | None, world_size: int
) -> int:
    """Return how many ranks read different data.

    By default this is the number of parts into which the loader's `DistributedSampler` divides the data.
    Without such a sampler, the ranks of a model that has only tensor parallelism share their data, and all
    other ranks have data of their own.

    Args:
        given: the argument `data_ranks` of the trainer, which is returned; None to find the number.
        model, loader: the model and the train loader.
        world_size: the number of ranks.

    Raises:
        TypeError, ValueError: `given` is not an int from 1 to `world_size` that divides it.
    """
    if given is not None:
        positive("data_ranks", given)
        if world_size % given:
            raise ValueError(
                f"data_ranks must divide the number of ranks, {world_size}, got {given}: it is the number of "
                "ranks that read different data, such as the size of the data dimension of a device mesh"
            )
        return given
    for sampler in samplers_of(loader).values():
        if isinstance(sampler, DistributedSampler) and world_size % sampler.num_replicas == 0:
            return int(sampler.num_replicas)
    return world_size // _tensor_parallel(model, world_size)


def _tensor_parallel(model: torch.nn.Module, world_size: int) -> int:
    """Return how many ranks share a batch, which is 1 unless the model has only tensor parallelism.

    Also return 1 if a mesh of ranks has a dimension along which no parameter is divided, because the data may
    be divided along that dimension.
    """
    if not gathers_weights(model) or is_wrapped_by_fsdp(model) or _has_ddp(model):
        return 1
    meshes: dict[Any, set[int]] = {}  # for each mesh the dimensions along which a parameter is sharded
    for parameter in filter(is_dtensor, model.parameters()):
        placements = enumerate(parameter.placements)  # type: ignore[attr-defined]
        sharded = {dimension for dimension, placement in placements if not placement.is_replicate()}
        meshes.setdefault(parameter.device_mesh, set()).update(sharded)  # type: ignore[attr-defined]
    sizes = [mesh.size() if len(sharded) == mesh.ndim else 1 for mesh, sharded in meshes.items()]
    size = max(sizes, default=1) if min(sizes, default=1) > 1 else 1
    return size if world_size % size == 0 else 1


def _has_ddp(model: torch.nn.Module) -> bool:
    return any(isinstance(module, DistributedDataParallel) for module in model.modules())
