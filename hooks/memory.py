"""How much memory a training takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from eventloop.events import AfterTrainIter, BeforeTrain
from eventloop.hooks.hook import Hook
from eventloop.schedule import positive

if TYPE_CHECKING:
    from eventloop.trainer import Trainer

MIB = 1 << 20
STATM = Path("/proc/self/statm")


class MemoryHook(Hook):
    """Puts, in MiB, `memory/resident`, and on a CUDA device `memory/max_allocated` and `memory/max_reserved`.

        MemoryHook(interval=10)

    `resident` is the physical memory of this process (of no loader worker), read from /proc/self/statm; systems
    without that file have no such metric. The other two are the peaks of `torch.cuda.max_memory_allocated` and
    `max_memory_reserved`, which the host keeps: nothing here waits for the device.

    Args:
        interval: put them every so many iterations, and in the last one.
        reset_peak: start the peaks anew after each time, so that each is that of its interval. Off by default,
            because everybody who reads the peaks shares them.
        device: the CUDA device to ask; by default the trainer's, else the one of the model's first parameter.

    Raises:
        TypeError, ValueError: `interval` is no positive int, or `device` no CUDA device.
    """

    def __init__(
        self, interval: int = 10, reset_peak: bool = False, device: str | torch.device | None = None
    ) -> None:
        positive("interval", interval)
        self._interval, self._reset_peak = interval, reset_peak
        self._given = None if device is None else torch.device(device)
        if self._given is not None and self._given.type != "cuda":
            raise ValueError(f"MemoryHook asks CUDA devices for their memory, got device={str(device)!r}")
        self._device: torch.device | None = None

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Settle which device is asked."""
        device = self._given or trainer.device or next((p.device for p in trainer.model.parameters()), None)
        self._device = device if device is not None and device.type == "cuda" else None

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Put the metrics when they are due."""
        if not (self.every_n_train_iters(trainer, self._interval) or self.is_last_train_iter(trainer)):
            return
        values = {} if (resident := resident_bytes()) is None else {"memory/resident": resident / MIB}
        if self._device is not None:
            values["memory/max_allocated"] = torch.cuda.max_memory_allocated(self._device) / MIB
            values["memory/max_reserved"] = torch.cuda.max_memory_reserved(self._device) / MIB
            if self._reset_peak:
                torch.cuda.reset_peak_memory_stats(self._device)
        trainer.metrics.put_scalars(values, smoothing_hint=False)


def resident_bytes() -> int | None:
    """Physical memory of this process, None where the system does not say."""
    try:
        pages = int(STATM.read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
