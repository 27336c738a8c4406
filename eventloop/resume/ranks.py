"""Gather the state of all ranks for a checkpoint, and choose each rank's part of it on a resume.

Every rank draws its own random numbers: for dropout, and in the workers of its loader for augmentation. So
the checkpoint, which rank 0 writes, holds the random state and the loader position of every rank.

The exchanges are collectives: every rank must make them in the same order, and waits for the others. If a
rank has ended, the checkpoint is saved with the state of rank 0 alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from eventloop.checkpoint.weights import unwrap
from eventloop.data.loader_state import random_state

T = TypeVar("T")

logger = logging.getLogger("eventloop")

_gloo_group: tuple[Any, Any] | None = None  # the default process group, and the gloo group made for it


def has_other_ranks() -> bool:
    """Return whether torch.distributed is initialised with more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gather_on_rank_0(own: T) -> list[T] | None:
    """Gather a value of every rank on rank 0.

    Returns:
        The values in the order of the ranks, on rank 0. None on the other ranks, and on rank 0 if a rank
        cannot be reached, which is logged.
    """
    own_rank = dist.get_rank()
    found: list[Any] | None = [None] * dist.get_world_size() if own_rank == 0 else None
    try:
        dist.gather_object(own, found, dst=0, group=_host_group())
    except RuntimeError as error:
        logger.warning("the random state of the other ranks cannot be gathered: %s", error)
        return None
    return found


def of_rank_0(own: T) -> T:
    """Return rank 0's value on every rank; if rank 0 cannot be reached, log that and return `own`."""
    box = [own]
    try:
        dist.broadcast_object_list(box, src=0, group=_host_group())
    except RuntimeError as error:
        logger.warning("rank 0 cannot broadcast its value to the other ranks: %s", error)
        return own
    return box[0]


def _host_group() -> Any:
    """Return a gloo group, which exchanges values without the GPU, or None to use the default group.

    The first call is a collective, because it makes the group.
    """
    global _gloo_group
    if dist.get_backend() == "gloo" or not dist.is_gloo_available():
        return None
    world = dist.group.WORLD
    if _gloo_group is None or _gloo_group[0] is not world:
        _gloo_group = world, dist.new_group(backend="gloo")
    return _gloo_group[1]


def own_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies in host memory of the saved buffers in which the ranks differ.

    The ranks differ if DistributedDataParallel does not broadcast rank 0's buffers in each forward pass. The
    copy waits for the GPU.
    """
    model = getattr(model, "_orig_mod", model)  # inside torch.compile
    if not isinstance(model, DistributedDataParallel) or model.broadcast_buffers:
        return {}
    inner = unwrap(model)
    saved = inner.state_dict().keys()
    return {name: buffer.detach().cpu() for name, buffer in inner.named_buffers() if name in saved}


class RankState(NamedTuple):
    """The part of a checkpoint from which one rank resumes.

    Args:
        rng: the rank's random state; None to keep the current one.
        position: the rank's position in the loader.
        inexact: the reason why the resume is not exact, for the log; "" if it is exact.
        buffers: the buffers in which the ranks differ, by name.
    """

    rng: Mapping[str, Any] | None
    position: Mapping[str, Any]
    inexact: str = ""
    buffers: Mapping[str, torch.Tensor] = {}

    def load_buffers(self, model: torch.nn.Module) -> None:
        """Copy the buffers of this rank into those of the model with the same name and shape."""
        own = dict(unwrap(model).named_buffers())
        for name, buffer in self.buffers.items():
            if name in own and own[name].shape == buffer.shape:
                own[name].copy_(buffer)


def state_of_rank(
    checkpoint: Mapping[str, Any], rank: int, world_size: int, loader: Iterable[Any] | None
) -> RankState:
    """Return the part of a checkpoint from which a rank resumes.

    It is the part that the rank of the same number saved. A rank that the checkpoint does not have keeps its
    current random state.

    Args:
        rank, world_size: the number of this rank, and the number of ranks of this run.
        loader: the loader of this run, whose random state such a rank keeps.
    """
    meta, others = checkpoint["meta"], checkpoint.get("ranks")
    first = RankState(checkpoint["rng"], meta["position"])
    saved = len(others) if others is not None else meta["settings"]["run"].get("world_size")
    if others is None and saved != 1 and world_size > 1:
        return first._replace(
            inexact="it has the random state and the loader position of rank 0 alone: every rank continues "
            "with them"
        )
    inexact = ""
    if saved not in (None, world_size):
        inexact = (
            f"it was saved by {saved} ranks, and this run has {world_size}: random numbers differ from here "
            "on"
        )
    if rank == 0:
        return first._replace(inexact=inexact)
    if others is not None and rank < len(others):
        part = others[rank]
        return RankState(part["rng"], part["position"], inexact, part["buffers"])
    own = {"opened_with": random_state(loader), "generators": {}, "loader": {}}
    return RankState(
        None, {**meta["position"], **own}, f"{inexact}; rank {rank} continues with its own random state"
    )
