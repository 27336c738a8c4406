"""Buffers that ranks keep each for themselves, made equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from eventloop.events import COMPLETED, AfterTrainEpoch, BeforeTestEpoch, BeforeTrain, BeforeValEpoch
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook, on
from eventloop.state.sharded import refuse_sharded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from eventloop.training.trainer import Trainer


class SyncBuffersHook(Hook):
    """Gives all ranks the same buffers after each training epoch, and before an evaluation in mid-epoch.

        hooks=[SyncBuffersHook()]

    Floating point buffers become the mean over ranks; integers and booleans, such as `num_batches_tracked`, those
    of rank 0. Ranks see different data, so their batch norm statistics drift apart; rank 0's alone would go into
    the checkpoint. The mean of variances leaves out how far the ranks' means lie apart: `PreciseBN` does not.
    Synced are the model's own buffers; those of an average are moved by them. Without a process group it does nothing.
    """

    priority = Priority.NORMAL

    def __init__(self) -> None:
        self._synced_at = -1

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Begin anew: the trainer may have gone back to a checkpoint, and come by the same iterations again.

        Raises:
            TypeError: a buffer is sharded over ranks.
        """
        for name, buffer in trainer.model.named_buffers():
            refuse_sharded(f"SyncBuffersHook: the buffer {name!r}", buffer)
        self._synced_at = -1

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Sync, if the epoch is done: after an error the other ranks may not be here, and an epoch that a stop cut short
        goes on when the run is resumed, with the buffers each rank has."""
        if event.reason == COMPLETED and trainer.bus.failing is None:
            self._sync(trainer)

    @on(priority=Priority.HIGH)  # before EMAHook puts an average there: what is put back would be as it was
    def before_val_epoch(self, trainer: Trainer, event: BeforeValEpoch) -> None:
        """Sync what was trained since the last time."""
        self._sync(trainer)

    @on(priority=Priority.HIGH)
    def before_test_epoch(self, trainer: Trainer, event: BeforeTestEpoch) -> None:
        """Sync what was trained since the last time."""
        self._sync(trainer)

    def _sync(self, trainer: Trainer) -> None:
        # within an iteration its number tells nothing: it is that of the boundary before it, until it is completed
        within = trainer.metrics.in_iteration
        if trainer.world_size > 1 and (within or self._synced_at != trainer.iter):
            sync_buffers(trainer.model.buffers())
            self._synced_at = -1 if within else trainer.iter


@torch.no_grad()
def sync_buffers(buffers: Iterable[torch.Tensor]) -> None:
    """Make tensors equal on all ranks, in place: the mean of floating point ones, rank 0's of others.

    One collective for each device and type; half precision is added up in float32.

    Raises:
        ValueError: there is no process group (from `torch.distributed`).
        TypeError: a buffer is sharded over ranks.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for number, buffer in enumerate(buffers):
        refuse_sharded(f"sync_buffers: the buffer {number}", buffer)
        groups.setdefault((buffer.device, buffer.dtype), []).append(buffer)
    for (_, dtype), group in groups.items():
        half = dtype in (torch.float16, torch.bfloat16)
        flat = torch.cat([(buffer.float() if half else buffer).reshape(-1) for buffer in group])
        if dtype.is_floating_point or dtype.is_complex:
            dist.all_reduce(torch.view_as_real(flat) if dtype.is_complex else flat)
            flat /= dist.get_world_size()
        else:
            dist.broadcast(flat, src=0)
        for buffer, value in zip(group, flat.split([buffer.numel() for buffer in group]), strict=True):
            buffer.copy_(value.view_as(buffer))
