"""Read the peak memory of this process, from the system and from PyTorch's allocator of CUDA memory."""

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
"""The file in which Linux shows the memory of this process."""
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)
"""Matches the line of `STATUS` with the peak of the resident memory."""


def peak_memory() -> Memory:
    """Return the peak memory in bytes of this process, on the host and on each CUDA device that it has used.

    It does not wait for a device. `torch.cuda.reset_peak_memory_stats`, which `MemoryHook(reset_peak=True)`
    calls, resets the peaks of a device.
    """
    return Memory(_host(), _devices())


def _host() -> int | None:
    """Return the peak of the resident memory in bytes; None on Windows.

    On Linux it is read from /proc, because `ru_maxrss` may be the peak of the process that started this one.
    """
    try:
        status = STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        status = ""
    if match := _PEAK.search(status):
        return int(match[1]) * 1024
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, else kilobytes


def _devices() -> list[DeviceMemory]:
    """Return the peaks of allocated and reserved memory of each CUDA device with reserved memory."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    peaks = []
    for index in range(torch.cuda.device_count()):
        if reserved := torch.cuda.max_memory_reserved(index):
            allocated = torch.cuda.max_memory_allocated(index)
            peaks.append(DeviceMemory(f"cuda:{index}", allocated, reserved))
    return peaks
