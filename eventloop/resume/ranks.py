"""Hold the state of each rank in a checkpoint, and choose each rank's part of it on a resume.

Every rank draws its own random numbers: for dropout, and in the workers of its loader for augmentation. So
the checkpoint, which rank 0 writes, holds the random state and the loader position of every rank.
If a rank has ended, the checkpoint is saved with the state of rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from eventloop.checkpoint.weights import unwrap
from eventloop.data.loader_state import random_state


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
