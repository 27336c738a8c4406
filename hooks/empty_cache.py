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
    """Call `torch.cuda.empty_cache()` in training, validation and test; do nothing without CUDA.

        EmptyCacheHook(after_epoch=True)

    This hook helps where a validation needs tensors of other sizes than the training, or another process
    shares the device. It does not make a program faster: each call waits for the device, and the next
    allocations go to the driver.

    Args:
        before_epoch, after_epoch, after_iter: whether to empty the cache before and after each pass over a
            loader, and after each batch.

    Raises:
        TypeError: an argument is not True or False.
    """

    def __init__(
        self, before_epoch: bool = False, after_epoch: bool = True, after_iter: bool = False
    ) -> None:
        self._switches = {"before_epoch": before_epoch, "after_epoch": after_epoch, "after_iter": after_iter}
        check_bools(**self._switches)

    def attach(self, bus: Bus) -> None:
        """Subscribe only the methods that are switched on."""
        super().attach(bus)
        for name, is_on in self._switches.items():
            # a subclass may override the method for each mode, so that this one is not subscribed
            if not is_on and name in self._points:
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
