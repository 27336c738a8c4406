"""A place where a sync costs nothing. What is tested is which operations are made and in which order, so any file
system will do."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = Path("/dev/shm")


@contextmanager
def directory_in_memory() -> Iterator[Path]:
    """An empty directory, removed afterwards; on the disk where there is no such place."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place, prefix="eventloop-tests-") as path:
        yield Path(path)
