"""Shuffling of distributed samplers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventloop.data.position import set_sampler_epoch
from eventloop.events import BeforeTrainEpoch
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer


class DistSamplerSeedHook(Hook):
    """Calls `set_epoch` of the train loader, else of its sampler or of its batch sampler's sampler, before each epoch,
    so that a distributed sampler shuffles differently in each. An iteration-based run does the same at each pass.

        loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
        Trainer(..., train_loader=loader)                      # every trainer has this hook
        Trainer(..., default_hooks=dict(sampler_seed=None))    # this one does without
    """

    priority = Priority.NORMAL

    def before_train_epoch(self, trainer: Trainer, event: BeforeTrainEpoch) -> None:
        """Seed the epoch."""
        if trainer.by_epoch and trainer.loader is not None:
            set_sampler_epoch(trainer.loader, trainer.epoch)
