"""A thread that does one thing after another, and may be left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class SaverThread:
    """Does what it is given, in order. It is a daemon, so that one whose disk hangs can be left behind: the threads
    of an executor are joined at the interpreter's exit. Where none can be started whoever gives it something does that
    at once."""

    def __init__(self, name: str) -> None:
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        thread = threading.Thread(target=self._run, name=f"eventloop {name}", daemon=True)
        self._thread: threading.Thread | None = thread
        try:
            thread.start()
        except RuntimeError:  # once the main thread has ended Python 3.12 starts none
            self._thread = None

    def do(self, work: Callable[[], None]) -> None:
        """Let the thread do `work`, which must not raise."""
        if self._thread is None:
            work()
        else:
            self._todo.put(work)

    def end(self, timeout: float | None = None) -> None:
        """End the thread once it is done; do not wait for it longer than `timeout` seconds."""
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            work()
            del work  # it holds the copy that was written
