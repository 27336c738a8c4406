"""Remove replaced checkpoints and the leftovers of saves that were killed.

The saver and `CheckpointHook` use it. Errors of the file system are logged or ignored, never raised.
"""

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
    """Remove checkpoints that a newer one replaces.

    A path without a manifest stays: the names may come from the checkpoint that was resumed from, which
    another program may have written. A checkpoint that cannot be removed is logged as a warning, and stays.
    """
    for path in paths:
        try:
            if (path / MANIFEST).exists():
                remove_checkpoint(path)
        except FileNotFoundError:  # removed by hand meanwhile
            continue
        except OSError as error:
            logger.warning("a checkpoint that was replaced could not be removed: %s", error)


def remove_dead(directory: Path) -> None:
    """Remove the leftovers of killed saves from a directory.

    A leftover with this process's id belongs to an earlier run (in a container each run may have the same
    id), unless another trainer of this process is writing it.
    """
    for left in leftovers(directory):
        writer = writer_of(left)
        former = writer == os.getpid() and left.name not in under_way
        if writer is not None and (former or not is_alive(writer)):
            with suppress(OSError):
                DISK.remove(left)


def remove_unfinished(path: Path, process: int) -> None:
    """Remove the incomplete files of one checkpoint that a process was writing."""
    for left in leftovers(path.parent, process):
        if left.name.startswith(f".{path.name}."):
            with suppress(OSError):
                DISK.remove(left)
