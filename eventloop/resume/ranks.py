"""What the ranks of a run tell each other when a checkpoint is saved, and what each takes back of it.

Every rank draws random numbers of its own: for dropout, and in the workers of its loader for augmentation. So the
checkpoint, which rank 0 writes, has the random state and the place in the loader of all of them.

Who asks waits for the others, so all ranks come here in the same order, as to every collective. One that has gone
costs what it would have said, and no checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from eventloop.checkpoint.weights import unwrap
from eventloop.data.rng import random_state

T = TypeVar("T")

logger = logging.getLogger("eventloop")

_made: tuple[Any, Any] | None = None  # a process group, and ours beside it


def several() -> bool:
    """True where there are other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def of_all_ranks(own: T) -> list[T] | None:
    """On rank 0 everybody's, by rank; None on the others, and where they could not be had, which is logged."""
    own_rank = dist.get_rank()
    found: list[Any] | None = [None] * dist.get_world_size() if own_rank == 0 else None
    try:
        dist.gather_object(own, found, dst=0, group=_host_group())
    except RuntimeError as error:
        logger.warning("the random state of the other ranks could not be had: %s", error)
        return None
    return found


def of_rank_0(own: T) -> T:
    """What rank 0 says; one's own where it could not be had, which is logged."""
    box = [own]
    try:
        dist.broadcast_object_list(box, src=0, group=_host_group())
    except RuntimeError as error:
        logger.warning("rank 0 could not tell the others what it saves: %s", error)
        return own
    return box[0]


def _host_group() -> Any:
    """A group over gloo, so that nothing goes by a device; None for the process group itself. Making one is a
    collective."""
    global _made
    if dist.get_backend() == "gloo" or not dist.is_gloo_available():
        return None
    world = dist.group.WORLD
    if _made is None or _made[0] is not world:
        _made = world, dist.new_group(backend="gloo")
    return _made[1]


def own_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers in which the ranks differ: all that are saved, where DistributedDataParallel was told not to give
    them rank 0's in each forward pass. They are copied to the host, for which a device is waited for."""
    model = getattr(model, "_orig_mod", model)  # inside torch.compile
    if not isinstance(model, DistributedDataParallel) or model.broadcast_buffers:
        return {}
    inner = unwrap(model)
    saved = inner.state_dict().keys()
    return {name: buffer.detach().cpu() for name, buffer in inner.named_buffers() if name in saved}


class Part(NamedTuple):
    """What one rank goes on with: its random state, None for the one it has; its place; what is not exact; and the
    buffers that are its own."""

    rng: Mapping[str, Any] | None
    position: Mapping[str, Any]
    inexact: str = ""
    buffers: Mapping[str, torch.Tensor] = {}

    def load_buffers(self, model: torch.nn.Module) -> None:
        """Give the model the buffers of this rank, where it has them in that shape."""
        own = dict(unwrap(model).named_buffers())
        for name, buffer in self.buffers.items():
            if name in own and own[name].shape == buffer.shape:
                own[name].copy_(buffer)


def part_of(checkpoint: Mapping[str, Any], rank: int, world_size: int, loader: Iterable[Any] | None) -> Part:
    """What a rank takes of a checkpoint. Its own, where as many ranks have saved; of another number of ranks, that
    of the rank of its number; a rank that was not there keeps its own random state."""
    meta, others = checkpoint["meta"], checkpoint.get("ranks")
    first = Part(checkpoint["rng"], meta["position"])
    saved = len(others) if others is not None else meta.get("settings", {}).get("run", {}).get("world_size")
    if others is None and saved != 1 and world_size > 1:
        return first._replace(
            inexact="it has the random state and the loader's of rank 0 alone: every rank goes on with them"
        )
    inexact = ""
    if saved not in (None, world_size):
        inexact = (
            f"it was saved by {saved} ranks, and this run has {world_size}: what they draw at random differs from "
            "here on"
        )
    if rank == 0:
        return first._replace(inexact=inexact)
    if others is not None and rank < len(others):
        part = others[rank]
        return Part(part["rng"], part["position"], inexact, part["buffers"])
    own = {"opened_with": random_state(loader), "generators": [], "loader": {}}
    return Part(None, {**meta["position"], **own}, f"{inexact}; rank {rank} goes on with its own")
