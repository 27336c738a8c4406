"""A thread that writes the windows of a trace, so that the training thread does not."""

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
    """Writes what it is given, in that order. A file that cannot be written is told of once, and ends nothing; so is a
    thread that cannot be started.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: Path) -> None:
        self._appender = TraceAppender(directory)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failed = False
        thread = threading.Thread(target=self._run, name="eventloop trace", daemon=True)
        self._thread: threading.Thread | None = thread
        try:
            thread.start()
        except RuntimeError as error:  # once the main thread has ended Python 3.12 starts none
            self._thread = None
            self._warn(error)

    def write(self, facts: WindowFacts, recorder: SpanRecorder) -> None:
        """Write the training thread's part of a window."""
        self._put(lambda: self._appender.write_window(facts, recorder))

    def close_window(self, key: int, recorder: SpanRecorder) -> None:
        """Write the rest of it."""
        self._put(lambda: self._appender.close_window(key, recorder))

    def end_soon(self) -> None:
        """End the thread once everything is written."""
        self._put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the end; False when it did not come in time."""
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
