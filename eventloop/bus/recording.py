"""A recorder's time on a bus: it begins, it ends for the emitting threads, and a little later for the
background.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, perf_counter
from types import TracebackType
from typing import Protocol, Self

from eventloop.background.loop import Background
from eventloop.background.queues.subscriber import Lane
from eventloop.costs.spans import INBOX, SpanRecorder
from eventloop.util.waiting import Latch

LINGER_SECONDS = 2.0
"""How long the background is recorded on after `stop`, for subscribers that lag behind."""
_LOOK_SECONDS = 0.02
"""How often the loop is asked to look, where somebody waits for it."""


class Emitting(Protocol):
    """The side whose handlers are recorded."""

    def record(self, recorder: SpanRecorder | None) -> None:
        """Leave spans with a recorder, or with none."""


class Recording:
    """What `Bus.record` returns; leaving it as a context manager stops it.

    `stop` ends the recording of synchronous handlers at once. Background subscribers are recorded until what
    was emitted up to then is delivered, but no longer than `LINGER_SECONDS`.
    """

    def __init__(self, recorder: SpanRecorder, emitting: Emitting, background: Background) -> None:
        self.recorder = recorder
        self._emitting = emitting
        self._background = background
        self._lock = threading.Lock()
        self._stopped = False
        self._finished = Latch()
        self._then: Callable[[], object] | None = None
        self._left: list[tuple[Lane, int]] | None = None
        self._deadline = 0.0

    @property
    def stopped(self) -> bool:
        """True once `stop` was called."""
        return self._stopped

    def begin(self) -> None:
        """Let handlers and lanes leave spans; what `Bus.record` does."""
        self._emitting.record(self.recorder)
        self._background.record(self.recorder, self._look)

    def go_on_with(self, background: Background) -> None:
        """Record the events of the new background after the bus was opened again."""
        self._background = background
        background.record(self.recorder, self._look)

    def stop(self, then: Callable[[], object] | None = None) -> None:
        """End the recording; a second time does nothing.

        Args:
            then: called once the background is done with it, too, on whichever thread finds that; it must not
                wait.
        """
        with self._lock:
            if self._stopped:
                return
            self._stopped, self._then = True, then
        self._emitting.record(None)
        if not self._background.after_routing(self._count_what_is_left):
            self.finish()

    def finish(self) -> None:
        """End it for the background, now."""
        self.stop()
        with self._lock:
            if self._finished.is_set():
                return
            self._background.record(None)
            now = perf_counter()
            for lane in list(self._background.lanes):
                lane.tell_under_way(self.recorder, now)
            self._finished.set()
        if self._then is not None:
            self._then()

    def wait(self, timeout: float) -> bool:
        """Wait until the recording is complete, then finish it. Return False after `timeout` seconds."""
        self.stop()
        deadline = monotonic() + timeout
        in_time = self._finished.is_set()
        while not in_time and monotonic() < deadline:
            self._background.wake()
            in_time = self._finished.wait(min(_LOOK_SECONDS, max(0.0, deadline - monotonic())))
        self.finish()
        return in_time

    def _look(self) -> None:
        """Take the depths of the queues, and finish when nothing is left; on the background loop's thread."""
        self.recorder.depth(INBOX, len(self._background.inbox))
        for lane in self._background.lanes:
            self.recorder.depth(lane.name, lane.queued)
        if self._left is None:
            return
        self._left = [left for left in self._left if left[0].handled < left[1] and not left[0].done]
        if not self._left or monotonic() >= self._deadline:
            self.finish()

    def _count_what_is_left(self) -> None:
        self._deadline = monotonic() + LINGER_SECONDS
        self._left = [(lane, lane.routed) for lane in self._background.lanes]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()
