"""Read the memory of this process."""

from __future__ import annotations

import os
from pathlib import Path


def resident_mib() -> float:
    """Return the resident size of this process in MiB, from Linux's /proc."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
