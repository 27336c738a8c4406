"""Record spans of the events, handlers and deliveries of a bus. `Bus.record` returns a `Recording`.

When it is stopped, synchronous handlers are no longer recorded, and background subscribers a little longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, perf_counter
from types import TracebackType
from typing import Protocol, Self

from eventloop.background.background import Background
from eventloop.background.queues.runner import Flush
from eventloop.costs.spans import SpanRecorder
from eventloop.util.waiting import Latch

LINGER_SECONDS = 2.0
"""The longest time in seconds after `stop` for which background deliveries are recorded."""
_POLL_SECONDS = 0.02
"""The interval in seconds at which `wait` wakes the thread that supervises the background's queues."""


class Emitting(Protocol):
    """The subscribers of a bus, whose synchronous handlers are recorded."""

    def record(self, recorder: SpanRecorder | None) -> None:
        """Begin to record spans with `recorder`; None stops the recording."""


class Recording:
    """A recording of spans on a bus. As a context manager it stops at the end of the block.

    `stop` ends the recording of synchronous handlers at once. Background subscribers are recorded until all
    events emitted before `stop` are delivered, at most for `LINGER_SECONDS`.
    """

    def __init__(self, recorder: SpanRecorder, emitting: Emitting, background: Background) -> None:
        self.recorder = recorder
        self._emitting = emitting
        self._background = background
        self._lock = threading.Lock()
        self._stopped = False
        self._finished = Latch()
        self._then: Callable[[], object] | None = None
        self._last_posted: Latch | None = (
            None  # set when the deferred events posted before `stop` are created
        )
        # the flushes to wait for, one for each subscriber, requested after that; None before
        self._pending: list[Flush] | None = None
        self._deadline = 0.0  # the latest `monotonic` time at which the recording ends; 0.0 until `stop`

    @property
    def stopped(self) -> bool:
        """True once `stop` was called."""
        return self._stopped

    def begin(self) -> None:
        """Begin to record handlers, deliveries and queue depths."""
        self._emitting.record(self.recorder)
        self._background.record(self.recorder, self._sample_depths)

    def continue_on(self, background: Background) -> None:
        """Continue with the new background of a bus that was reopened."""
        self._background = background
        background.record(self.recorder, self._sample_depths)

    def stop(self, then: Callable[[], object] | None = None) -> None:
        """End the recording. Stopping again does nothing.

        Args:
            then: called when the recording has ended for background subscribers too, on the thread that ends
                it. It must not wait.
        """
        with self._lock:
            if self._stopped:
                return
            self._stopped, self._then = True, then
        self._emitting.record(None)
        self._record_pending()
        if self._background.finished or not self._background.subscribers:
            self.finish()

    def finish(self) -> None:
        """End the recording at once for handlers and background subscribers."""
        self.stop()
        with self._lock:
            if self._finished.is_set():
                return
            self._background.record(None)
            now = perf_counter()
            for subscriber in list(self._background.subscribers):
                subscriber.record_current(self.recorder, now)
            self._finished.set()
        if self._then is not None:
            self._then()

    def wait(self, timeout: float) -> bool:
        """Stop, wait until background subscribers have delivered the earlier events, and end the recording.

        Returns:
            False if they have not done so within `timeout` seconds.
        """
        self.stop()
        deadline = monotonic() + timeout
        in_time = self._finished.is_set()
        while not in_time and monotonic() < deadline:
            self._background.wake()
            in_time = self._finished.wait(min(_POLL_SECONDS, max(0.0, deadline - monotonic())))
        self.finish()
        return in_time

    def _sample_depths(self) -> None:
        """Record the depth of each queue, and finish once the events emitted before `stop` are delivered.

        The thread that supervises the queues calls this each time after it has checked them, and has created
        the events of `Deferred` objects.
        """
        for subscriber in self._background.subscribers:
            self.recorder.depth(subscriber.name, subscriber.queued)
        if not self._deadline:
            return
        if self._pending is None and (self._last_posted is None or self._last_posted.is_set()):
            self._pending = [
                subscriber.request_flush(calls=False)
                for subscriber in self._background.subscribers
                if not subscriber.done
            ]
        if self._pending is not None:
            self._pending = [flush for flush in self._pending if not flush.made.is_set()]
        if self._pending == [] or monotonic() >= self._deadline:
            self.finish()

    def _record_pending(self) -> None:
        """Let background subscribers be recorded until they have delivered the events emitted so far."""
        self._last_posted = self._background.last_posted()
        self._deadline = monotonic() + LINGER_SECONDS
        self._background.wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()


def begin_recording(
    recorder: SpanRecorder, emitting: Emitting, background: Background, former: Recording | None
) -> Recording:
    """Begin a recording on a bus, and finish `former`, the previous recording, which must be stopped.

    Raises:
        RuntimeError: the previous recording was not stopped.
    """
    if former is not None:
        if not former.stopped:
            raise RuntimeError("another recorder is on this bus: stop its recording first")
        former.finish()
    recording = Recording(recorder, emitting, background)
    recording.begin()
    return recording
