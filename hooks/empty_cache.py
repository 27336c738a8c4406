"""A hook that returns cached memory of the CUDA device to the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from eventloop.bus import Bus
from eventloop.hooks.hook import Hook
from eventloop.util.checks import check_bools

if TYPE_CHECKING:
    from eventloop.hooks.points import EpochEvent, IterEvent
    from eventloop.training.trainer import Trainer


class EmptyCacheHook(Hook):
    """Call `torch.cuda.empty_cache()` in training, validation and test; without CUDA it does nothing.

        EmptyCacheHook(after_epoch=True)

    This hook helps where a validation needs tensors of other sizes than the training, or another process
    shares the device. It does not make a program faster: each call waits for the device, and the next
    allocations go to the driver. Points that are switched off cost nothing.

    Args:
        before_epoch, after_epoch, after_iter: when to empty the cache.

    Raises:
        TypeError: an argument is not True or False.
    """

    def __init__(
        self, before_epoch: bool = False, after_epoch: bool = True, after_iter: bool = False
    ) -> None:
        self._when = {"before_epoch": before_epoch, "after_epoch": after_epoch, "after_iter": after_iter}
        check_bools(**self._when)

    def attach(self, bus: Bus) -> None:
        """Subscribe only the points that are switched on."""
        super().attach(bus)
        for name, wanted in self._when.items():
            if not wanted and name in self._points:  # a subclass may have a method for each mode instead
                bus.off(getattr(self, name))

    def before_epoch(self, trainer: Trainer, event: EpochEvent) -> None:
        """Empty the cache before a pass over a loader."""
        torch.cuda.empty_cache()

    def after_epoch(self, trainer: Trainer, event: EpochEvent) -> None:
        """Empty the cache after a pass over a loader."""
        torch.cuda.empty_cache()

    def after_iter(self, trainer: Trainer, event: IterEvent) -> None:
        """Empty the cache after each batch."""
        torch.cuda.empty_cache()
