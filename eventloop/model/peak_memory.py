"""Read the peak memory of this process from the system and PyTorch's allocators, without waiting."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from eventloop.costs.records import DeviceMemory, Memory

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

STATUS = Path("/proc/self/status")
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


def peak_memory() -> Memory:
    """Return the peak memory of this process on the host and on each CUDA device that it used.

    `torch.cuda.reset_peak_memory_stats` resets the peaks of a device, as `MemoryHook(reset_peak=True)` does.
    """
    return Memory(_host(), _devices())


def _host() -> int | None:
    """Return the peak in bytes; None on Windows.

    On Linux, `ru_maxrss` may be the peak of the process that started this one, so /proc is read instead.
    """
    try:
        status = STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        status = ""
    if found := _PEAK.search(status):
        return int(found[1]) * 1024
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _devices() -> list[DeviceMemory]:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    reserved = {index: torch.cuda.max_memory_reserved(index) for index in range(torch.cuda.device_count())}
    return [
        DeviceMemory(f"cuda:{index}", torch.cuda.max_memory_allocated(index), held)
        for index, held in reserved.items()
        if held
    ]
