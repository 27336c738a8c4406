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

    Floating point buffers are set to their mean over ranks; integers and booleans, such as
    `num_batches_tracked`, to rank 0's values. Ranks train on different data, so their batch norm statistics
    differ, and the checkpoint would hold only rank 0's. The mean of the ranks' variances ignores that their
    means differ; `PreciseBN` takes that into account. The hook syncs the model's own buffers. `EMAHook`
    evaluates with them, or averages them with `update_buffers=True`. Without a process group this hook does
    nothing.
    """

    priority = Priority.NORMAL

    def __init__(self) -> None:
        self._synced_at = -1
        """The number of completed iterations at the last sync; -1 if the buffers may differ."""

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Let the next evaluation sync the buffers, because a checkpoint may have changed them.

        Raises:
            TypeError: a buffer is sharded over ranks.
        """
        for name, buffer in trainer.model.named_buffers():
            refuse_sharded(f"SyncBuffersHook: the buffer {name!r}", buffer)
        self._synced_at = -1

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Sync the buffers after a completed epoch.

        After an error nothing is synced, because other ranks may not call this method. After a stop within an
        epoch nothing is synced either: a resumed run continues the epoch with each rank's own buffers.
        """
        if event.reason == COMPLETED and trainer.bus.failing is None:
            self._sync(trainer)

    # with priority HIGH a sync comes before EMAHook (priority 49) swaps the average into the model; its swap
    # back after the evaluation would undo a later sync

    @on(priority=Priority.HIGH)
    def before_val_epoch(self, trainer: Trainer, event: BeforeValEpoch) -> None:
        """Sync the buffers before a validation, unless no iteration was trained since the last sync."""
        self._sync(trainer)

    @on(priority=Priority.HIGH)
    def before_test_epoch(self, trainer: Trainer, event: BeforeTestEpoch) -> None:
        """Sync the buffers before a test, unless no iteration was trained since the last sync."""
        self._sync(trainer)

    @on(priority=Priority.HIGH)
    def before_predict(self, trainer: Trainer, event: BeforePredict) -> None:
        """Sync the buffers before a prediction, unless no iteration was trained since the last sync."""
        self._sync(trainer)

    def _sync(self, trainer: Trainer) -> None:
        """Sync the buffers on several ranks, unless no iteration was trained since the last sync."""
        # within an iteration `trainer.iter` does not count this iteration yet, so always sync
        in_iteration = trainer.metrics.in_iteration
        if trainer.world_size > 1 and (in_iteration or self._synced_at != trainer.iter):
            sync_buffers(trainer.model.buffers())
            self._synced_at = -1 if in_iteration else trainer.iter


@torch.no_grad()
def sync_buffers(buffers: Iterable[torch.Tensor]) -> None:
    """Set floating point tensors to their mean over ranks, in place, and others to rank 0's values.

    There is one collective per device and dtype; half precision is summed in float32.

    Raises:
        ValueError: there is no process group (raised by `torch.distributed`).
        TypeError: a buffer is sharded over ranks.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for index, buffer in enumerate(buffers):
        refuse_sharded(f"sync_buffers: the buffer {index}", buffer)
        groups.setdefault((buffer.device, buffer.dtype), []).append(buffer)
    for (_, dtype), group in groups.items():
        is_half = dtype in (torch.float16, torch.bfloat16)
        flat = torch.cat([(buffer.float() if is_half else buffer).reshape(-1) for buffer in group])
        with waiting("ranks", "the buffers"):
            if dtype.is_floating_point or dtype.is_complex:
                dist.all_reduce(torch.view_as_real(flat) if dtype.is_complex else flat)
                flat /= dist.get_world_size()
            else:
                dist.broadcast(flat, src=0)
        values = flat.split([buffer.numel() for buffer in group])
        for buffer, value in zip(group, values, strict=True):
            buffer.copy_(value.view_as(buffer))
