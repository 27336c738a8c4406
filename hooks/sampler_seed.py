"""A hook that makes distributed samplers shuffle differently in each epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventloop.data.loader_state import set_epoch
from eventloop.events import BeforeTrainEpoch
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer


class DistSamplerSeedHook(Hook):
    """Call `set_epoch` of the train loader, or of its sampler and data set, before each epoch.

        loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
        Trainer(..., train_loader=loader)                      # every trainer has this hook
        Trainer(..., default_hooks=dict(sampler_seed=None))    # removes the hook

    A distributed sampler then shuffles differently in each epoch, and so does a streamed data set of Hugging
    Face. If the loader has no `set_epoch`, the hook calls that of its sampler, or of its batch sampler's
    sampler, and that of its data set. If the loader combines several loaders, this is done for each of them.
    In a run measured in iterations the trainer itself calls `set_epoch` before each pass over the loader.
    """

    priority = Priority.NORMAL
    owns = "the seeds of the samplers"

    def before_train_epoch(self, trainer: Trainer, event: BeforeTrainEpoch) -> None:
        """Call `set_epoch` of the loader or its parts with the current epoch."""
        if trainer.by_epoch and trainer.loader is not None:
            set_epoch(trainer.loader, trainer.epoch)
