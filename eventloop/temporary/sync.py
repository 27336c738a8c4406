"""Make the names in a directory durable, so that a crash of the machine undoes no rename."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Sync a directory, which makes the names in it durable; do nothing if the file system cannot do so.

    Some network file systems cannot sync a directory.

    Raises:
        OSError: the disk reports an error.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
