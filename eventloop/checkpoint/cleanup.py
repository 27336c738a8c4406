"""What is removed when a checkpoint is saved: what it replaces, and what saves that never ended have left."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from eventloop.checkpoint.directory import writer_of
from eventloop.checkpoint.disk import DISK
from eventloop.checkpoint.listing import is_alive
from eventloop.checkpoint.manifest import MANIFEST
from eventloop.checkpoint.store import leftovers, remove_checkpoint, under_way

logger = logging.getLogger("eventloop")


def remove_replaced(paths: Sequence[Path]) -> None:
    """Remove checkpoints; one that cannot be removed is named and left. What is no checkpoint is left too: the names
    may come from the checkpoint that was resumed from, and another program may have written that."""
    for path in paths:
        try:
            if (path / MANIFEST).exists():
                remove_checkpoint(path)
        except FileNotFoundError:  # somebody prunes by hand
            continue
        except OSError as error:
            logger.warning("a checkpoint that was replaced could not be removed: %s", error)


def remove_dead(directory: Path) -> None:
    """Remove what saves that were killed have left in a directory. In a container each run may have the same number, so
    what bears this process's is a former one's, unless another trainer of this process is writing it."""
    for left in leftovers(directory):
        writer = writer_of(left)
        former = writer == os.getpid() and left.name not in under_way
        if writer is not None and (former or not is_alive(writer)):
            with suppress(OSError):
                DISK.remove(left)


def remove_unfinished(path: Path, process: int) -> None:
    """Remove what a process that writes no more has begun of a checkpoint; others may be writing beside it."""
    for left in leftovers(path.parent, process):
        if left.name.startswith(f".{path.name}."):
            with suppress(OSError):
                DISK.remove(left)
