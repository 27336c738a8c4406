"""A hook that makes the buffers of a model equal on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from eventloop.costs.waits import waiting
from eventloop.events import (
    COMPLETED,
    AfterTrainEpoch,
    BeforePredict,
    BeforeTestEpoch,
    BeforeTrain,
    BeforeValEpoch,
)
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook, on
from eventloop.state.sharded import refuse_sharded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from eventloop.training.trainer import Trainer


class SyncBuffersHook(Hook):
    """Make the model's buffers equal on all ranks after each epoch, and before a mid-epoch evaluation.

        hooks=[SyncBuffersHook()]

    Floating point buffers become the mean over ranks; integers and booleans, such as `num_batches_tracked`,
    become those of rank 0. Ranks see different data, so their batch norm statistics differ, and the
    checkpoint would hold only rank 0's. The mean of variances ignores the differences between the ranks'
    means; `PreciseBN` includes them. The hook syncs the model's own buffers, which `EMAHook` evaluates with,
    or averages with `update_buffers=True`. Without a process group it does nothing.
    """

    priority = Priority.NORMAL

    def __init__(self) -> None:
        self._synced_at = -1

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Discard the note of the last sync, because an earlier checkpoint may have been loaded.

        Raises:
            TypeError: a buffer is sharded over ranks.
        """
        for name, buffer in trainer.model.named_buffers():
            refuse_sharded(f"SyncBuffersHook: the buffer {name!r}", buffer)
        self._synced_at = -1

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Sync the buffers after a completed epoch.

        After an error there is no sync, because the other ranks may never get here. An epoch that a stop cut
        short continues when the run is resumed, with each rank's own buffers.
        """
        if event.reason == COMPLETED and trainer.bus.failing is None:
            self._sync(trainer)

    @on(priority=Priority.HIGH)  # before EMAHook (49) swaps the average in; swapping back would undo the sync
    def before_val_epoch(self, trainer: Trainer, event: BeforeValEpoch) -> None:
        """Sync buffers that changed since the last sync, before a validation."""
        self._sync(trainer)

    @on(priority=Priority.HIGH)
    def before_test_epoch(self, trainer: Trainer, event: BeforeTestEpoch) -> None:
        """Sync buffers that changed since the last sync, before a test."""
        self._sync(trainer)

    @on(priority=Priority.HIGH)
    def before_predict(self, trainer: Trainer, event: BeforePredict) -> None:
        """Sync buffers that changed since the last sync, before a prediction."""
        self._sync(trainer)

    def _sync(self, trainer: Trainer) -> None:
        # within an iteration `iter` still has the value from before it, so it cannot identify a sync
        within = trainer.metrics.in_iteration
        if trainer.world_size > 1 and (within or self._synced_at != trainer.iter):
            sync_buffers(trainer.model.buffers())
            self._synced_at = -1 if within else trainer.iter


@torch.no_grad()
def sync_buffers(buffers: Iterable[torch.Tensor]) -> None:
    """Make tensors equal on all ranks, in place: floating point ones get the mean, others rank 0's values.

    There is one collective per device and dtype; half precision is summed in float32.

    Raises:
        ValueError: there is no process group (raised by `torch.distributed`).
        TypeError: a buffer is sharded over ranks.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for number, buffer in enumerate(buffers):
        refuse_sharded(f"sync_buffers: the buffer {number}", buffer)
        groups.setdefault((buffer.device, buffer.dtype), []).append(buffer)
    for (_, dtype), group in groups.items():
        half = dtype in (torch.float16, torch.bfloat16)
        flat = torch.cat([(buffer.float() if half else buffer).reshape(-1) for buffer in group])
        with waiting("ranks", "the buffers"):
            if dtype.is_floating_point or dtype.is_complex:
                dist.all_reduce(torch.view_as_real(flat) if dtype.is_complex else flat)
                flat /= dist.get_world_size()
            else:
                dist.broadcast(flat, src=0)
        for buffer, value in zip(group, flat.split([buffer.numel() for buffer in group]), strict=True):
            buffer.copy_(value.view_as(buffer))
