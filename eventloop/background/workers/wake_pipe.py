"""Wake a thread that waits in the system call `poll`, from any thread."""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress


class WakePipe:
    """A pipe whose end `fd` becomes readable, which ends a `poll`, when a thread calls `wake`."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._lock = threading.Lock()

    def wake(self) -> None:
        """Make `fd` readable; do nothing after `close`. Any thread may call this."""
        with self._lock, suppress(BlockingIOError):  # a full pipe is readable already
            if self._write_fd >= 0:
                os.write(self._write_fd, b"\0")

    def sleep(self, seconds: float) -> None:
        """Wait until another thread calls `wake`, at most this number of seconds."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        if poll.poll(seconds * 1e3):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """Close both ends."""
        with self._lock:
            os.close(self.fd)
            os.close(self._write_fd)
            self._write_fd = -1
