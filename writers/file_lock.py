"""Lock a file against other processes: until it is closed, or while a `with` block writes to it."""

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
"""Seconds between two tries of `lock_file`, whose lock another run may hold for long."""
WRITE_POLL_SECONDS = 0.001
"""Seconds between two tries of `locked`, whose lock is usually held for less than that, for one write."""


def lock_file(path: Path, seconds: float) -> FileIO:
    """Open a file, which is created if needed, lock it and return it; closing the file releases the lock.

    A forked child process does not hold the lock. This process also loses the lock when it closes any other
    handle of the same file. On Windows nothing is locked.

    Args:
        path: the file to lock.
        seconds: how long to wait while another process holds the lock.

    Raises:
        TimeoutError: another process held the lock all that time.
    """
    file = FileIO(path, "ab")
    deadline = monotonic() + seconds
    while fcntl is not None:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if monotonic() > deadline:
                file.close()
                raise TimeoutError(
                    f"another process writes this run: it has held {path} for {seconds:g} s"
                ) from None
        sleep(POLL_SECONDS)
    return file


@contextmanager
def locked(file: FileIO, seconds: float) -> Iterator[None]:
    """Lock an open file against other users of this function while the `with` block writes to it.

    The block runs without the lock if the system or the file system has no locks, or if another process holds
    the lock for more than `seconds`, for example because that process was suspended.

    Args:
        file: the open file.
        seconds: how long to wait while another process holds the lock.
    """
    deadline = monotonic() + seconds
    while fcntl is not None:
        # flock, not lockf, because two writers of one process must exclude each other, too, and because
        # lockf would release the lock when the other writer closes the file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() > deadline:
                break
            sleep(WRITE_POLL_SECONDS)
            continue
        except OSError:  # this file system has no locks
            pass
        break
    try:
        yield
    finally:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
