"""A hook that records the memory use of a training as metrics."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from eventloop.events import AfterTrain, AfterTrainIter, BeforeTrain
from eventloop.hooks.hook import Hook
from eventloop.hooks.log_text import log_text
from eventloop.util.checks import check_bools, positive

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

MIB = 1 << 20
_STATS = {
    "memory/allocated": "allocated_bytes.all.current",
    "memory/reserved": "reserved_bytes.all.current",
    "memory/max_allocated": "allocated_bytes.all.peak",
    "memory/max_reserved": "reserved_bytes.all.peak",
}
"""The names of the metrics, each with its key in `torch.cuda.memory_stats`."""
STATM = Path("/proc/self/statm")
"""The file in which Linux counts the pages of the process; its second number is the resident pages."""


class MemoryHook(Hook):
    """Record the memory use of the process and of the CUDA device as metrics, in MiB.

        MemoryHook(interval=10)

    `memory/resident` is the physical memory of this process without loader workers. It is read from
    /proc/self/statm, and not recorded on systems without this file. For a CUDA device the hook records
    `memory/allocated`, `memory/reserved` and their peaks, `memory/max_allocated` and `memory/max_reserved`.
    These are the numbers that `torch.cuda.memory_allocated()` and similar functions return. PyTorch's
    allocator keeps them on the host, so the hook never waits for the device.

    Args:
        interval: iterations between two records; the last iteration is recorded too.
        summary: True logs `torch.cuda.memory_summary` when training ends.
        reset_peak: True resets the peaks after each record, so that a peak is that of one interval. False by
            default, because all code of the process shares the peaks.
        device: the CUDA device; by default the trainer's, else that of the model's first parameter.

    Raises:
        TypeError, ValueError: `interval` is not a positive int, `device` is not a CUDA device, or another
            option is not a bool.
    """

    def __init__(
        self,
        interval: int = 10,
        reset_peak: bool = False,
        device: str | torch.device | None = None,
        summary: bool = False,
    ) -> None:
        positive("interval", interval)
        check_bools(reset_peak=reset_peak, summary=summary)
        self._interval, self._reset_peak, self._summary = interval, reset_peak, summary
        self._given_device = None if device is None else torch.device(device)
        if self._given_device is not None and self._given_device.type != "cuda":
            raise ValueError(f"MemoryHook needs a CUDA device, got device={str(device)!r}")
        self._device: torch.device | None = None

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Choose the device whose memory is measured."""
        device_of_model = next((p.device for p in trainer.model.parameters()), None)
        device = self._given_device or trainer.device or device_of_model
        self._device = device if device is not None and device.type == "cuda" else None

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Record the memory in use as metrics every `interval` iterations, and in the last one."""
        if not (self.every_n_train_iters(trainer, self._interval) or self.is_last_train_iter(trainer)):
            return
        resident = resident_bytes()
        values = {} if resident is None else {"memory/resident": resident / MIB}
        if self._device is not None:
            # one call for all statistics; torch.cuda.memory_allocated() and similar functions make one each
            stats = torch.cuda.memory_stats(self._device)
            values |= {name: stats.get(key, 0) / MIB for name, key in _STATS.items()}
            if self._reset_peak:
                torch.cuda.reset_peak_memory_stats(self._device)
        trainer.metrics.put_scalars(values, smoothing_hint=False)

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Log the summary of the CUDA device's memory if `summary` is True."""
        if self._summary and self._device is not None:
            log_text(trainer, "memory_summary", "\n" + torch.cuda.memory_summary(self._device))


def resident_bytes() -> int | None:
    """Return the physical memory of this process in bytes; None if the system has no /proc/self/statm."""
    try:
        pages = int(STATM.read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
