"""Lock a file against other processes, until the lock is closed or the process ends."""

from __future__ import annotations

from io import FileIO
from pathlib import Path
from time import monotonic, sleep

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

POLL_SECONDS = 0.05


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
