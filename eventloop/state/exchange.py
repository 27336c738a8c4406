"""Exchange Python objects and numbers between the ranks of a training, in host memory.

The exchanges are collectives: every rank must make them in the same order, and waits for the others. They use
gloo. With NCCL, PyTorch would put the objects on the current GPU, which is the first one on every rank whose
script has not called `torch.cuda.set_device`.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import torch.distributed as dist

from eventloop.costs.waits import waiting

EXCHANGE = "an exchange of values"
"""The name of these waits in the costs."""
T = TypeVar("T")

logger = logging.getLogger("eventloop")

_gloo_group: tuple[Any, Any] | None = None  # the default process group, and the gloo group made for it


def has_other_ranks() -> bool:
    """Return whether torch.distributed is initialised with more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gather(own: T) -> list[T]:
    """Return the objects of all ranks, by rank; a collective. Without other ranks it is only `own`."""
    if not has_other_ranks():
        return [own]
    ranks = [own] * dist.get_world_size()
    with waiting("ranks", EXCHANGE):
        dist.all_gather_object(ranks, own, group=host_group())
    return ranks


def gather_on_rank_0(own: T) -> list[T] | None:
    """Gather a value of every rank on rank 0.

    Returns:
        The values in the order of the ranks, on rank 0. None on the other ranks, and on rank 0 if a rank
        cannot be reached, which is logged.
    """
    own_rank = dist.get_rank()
    found: list[Any] | None = [None] * dist.get_world_size() if own_rank == 0 else None
    try:
        with waiting("ranks", EXCHANGE):
            dist.gather_object(own, found, dst=0, group=host_group())
    except RuntimeError as error:
        logger.warning("the random state of the other ranks cannot be gathered: %s", error)
        return None
    return found


def of_rank_0(own: T) -> T:
    """Return rank 0's value on every rank; if rank 0 cannot be reached, log that and return `own`."""
    box = [own]
    try:
        with waiting("ranks", EXCHANGE):
            dist.broadcast_object_list(box, src=0, group=host_group())
    except RuntimeError as error:
        logger.warning("rank 0 cannot broadcast its value to the other ranks: %s", error)
        return own
    return box[0]


def host_group() -> Any:
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
