"""Lock a file against other processes, until it is closed, or while a block writes to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from time import monotonic, sleep

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

POLL_SECONDS = 0.05
"""Seconds between two tries to lock a run."""
WRITE_POLL_SECONDS = 0.001
"""Seconds between two tries to lock a file for one write, which takes less."""


def lock_file(path: Path, seconds: float) -> FileIO:
    """Create a file, lock it and return it open; closing the file releases the lock.

    A forked child process does not have the lock. Closing any other handle of the file in this process
    releases it too.

    Args:
        seconds: how long to wait for another process that holds the lock.

    Raises:
        TimeoutError: another process holds the lock for longer.
    """
    file = FileIO(path, "ab")
    until = monotonic() + seconds
    while fcntl is not None:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if monotonic() > until:
                file.close()
                raise TimeoutError(
                    f"another process writes this run: it has held {path} for {seconds:g} s"
                ) from None
        sleep(POLL_SECONDS)
    return file


@contextmanager
def locked(file: FileIO, seconds: float) -> Iterator[None]:
    """Lock an open file against other processes that also lock it, while the block writes to it.

    The block runs without the lock on a system or file system without locks. It also does so if another
    process holds the lock for longer, for example because it was stopped in its block.

    Args:
        seconds: how long to wait for another process that holds the lock.
    """
    until = monotonic() + seconds
    while fcntl is not None:
        try:  # unlike lockf's, this lock excludes other writers of this process, and their close keeps it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() > until:
                break
            sleep(WRITE_POLL_SECONDS)
            continue
        except OSError:
            pass
        break
    try:
        yield
    finally:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
