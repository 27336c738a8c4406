"""Write the windows of a trace on a thread of its own.

`TraceHook` uses it; so the training thread does not wait for the disk.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from eventloop.costs.spans import SpanRecorder
from eventloop.tracing.file import TraceAppender, WindowFacts

logger = logging.getLogger("eventloop")


class TraceWriter:
    """Write windows in the order of the calls.

    If the file cannot be written, or the thread cannot be started, it logs one warning and drops every
    further window.

    Args:
        directory: the run's directory.
    """

    def __init__(self, directory: Path) -> None:
        self._appender = TraceAppender(directory)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failed = False
        thread = threading.Thread(target=self._run, name="eventloop trace", daemon=True)
        self._thread: threading.Thread | None = thread
        try:
            thread.start()
        except RuntimeError as error:  # Python 3.12 starts no thread once the main thread has ended
            self._thread = None
            self._warn(error)

    def write(self, facts: WindowFacts, recorder: SpanRecorder) -> None:
        """Write the training thread's part of a window."""
        self._put(lambda: self._appender.write_window(facts, recorder))

    def close_window(self, key: int, recorder: SpanRecorder) -> None:
        """Write the background's part of a window, which ends it."""
        self._put(lambda: self._appender.close_window(key, recorder))

    def end_soon(self) -> None:
        """End the thread once all windows are written."""
        self._put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; return False if it has not ended after `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def _put(self, job: Callable[[], None] | None) -> None:
        if self._thread is not None:
            self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._failed:
                continue
            try:
                job()
            except Exception as error:
                self._failed = True
                self._warn(error)

    def _warn(self, error: Exception) -> None:
        logger.warning("the trace was not written to %s: %s", self._appender.path, error)
