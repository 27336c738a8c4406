"""Record a part of a run: spans of time, and depths of queues.

    recorder = SpanRecorder()
    with bus.record(recorder) as recording:
        trainer.train()
    recording.wait(1.0)
    print(len(recorder.spans), recorder.lost)

While a recorder is on a bus, every event, handler call and delivery leaves a span; see `Bus.record`.
A span costs two reads of the clock and an append. Times are `perf_counter`'s, in seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Any, Literal

import msgspec

from eventloop.costs.records import RunsOn
from eventloop.events import Event
from eventloop.events.base import event_name

LIMIT = 100_000
"""Spans, and depths, that a recorder takes at most: about 15 MB of each."""

INBOX = "inbox"
"""The queue between the emitting threads and the background loop."""
SAVER = "checkpoint saver"
"""The track of what writes checkpoints."""

Kind = Literal["iteration", "phase", "event", "handler", "delivery", "save"]
Run = Callable[[Event, Any], None]
Clocked = Callable[[Event, Any, int], None]


class Span(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One thing that took time."""

    track: int | str
    """Where: a thread by its `get_ident`, a background subscriber by its name."""
    kind: Kind
    name: str
    began: float
    seconds: float
    iter: int | None = None
    event: str = ""
    """What a handler was called for, or what was delivered; "" of a batch of several types."""
    number: int = 0
    """A handler's priority; how many events a delivery is."""


class Depth(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """How many events were in a queue."""

    queue: str
    """A background subscriber's name, or `INBOX`."""
    at: float
    events: int


class SpanRecorder:
    """Takes spans and depths from any thread, without a lock; `limit` of each, and counts those beyond.

    Raises:
        TypeError, ValueError: `limit` is no positive int.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int):
            raise TypeError(f"limit must be a number of spans, got {limit!r}")
        if limit < 1:
            raise ValueError(f"limit must be at least 1 span, got {limit}")
        self.limit = limit
        self.spans: list[Span] = []
        """In the order they ended."""
        self.depths: list[Depth] = []
        self.threads: dict[int, str] = {}
        """Names of the threads that have tracks."""
        self.lanes: dict[str, RunsOn] = {}
        """Background subscribers that have tracks, and where they run."""
        self.lost = 0
        """How many were not taken because of the limit."""
        self._counting = threading.Lock()  # taken only where something is lost

    def add(self, span: Span) -> None:
        """Take a span."""
        if len(self.spans) < self.limit:
            self.spans.append(span)
        else:
            self._lose()

    def depth(self, queue: str, events: int) -> None:
        """Record the current depth of a queue."""
        if len(self.depths) < self.limit:
            self.depths.append(Depth(queue, perf_counter(), events))
        else:
            self._lose()

    def here(
        self, kind: Kind, name: str, began: float, seconds: float, iter: int | None, *,
        event: str = "", number: int = 0,
    ) -> None:  # fmt: skip
        """Record a span of this thread."""
        thread = get_ident()
        if thread not in self.threads:
            self.threads[thread] = threading.current_thread().name
        self.add(Span(thread, kind, name, began, seconds, iter, event, number))

    def delivered(
        self, lane: str, runs_on: RunsOn, item: Event | list[Event], began: float, seconds: float,
        note: str = "",
    ) -> None:  # fmt: skip
        """Record a delivery to a background subscriber."""
        self.lanes[lane] = runs_on
        events = item if isinstance(item, list) else [item]
        types = {type(event) for event in events}
        name = event_name(types.pop()) if len(types) == 1 else ""
        iteration = getattr(events[-1], "iter", None) if events else None
        label = name if isinstance(item, Event) else f"{len(events)} × {name or 'events'}"
        self.add(
            Span(lane, "delivery", f"{label} {note}".rstrip(), began, seconds, iteration, name, len(events))
        )

    # --- what a plan runs instead of its own ---------------------------------------------------------------

    def watch_event(self, name: str, run: Run) -> Run:
        """`run`, which dispatches the event `name`, leaving a span."""

        def watched(event: Event, trainer: Any) -> None:
            began = perf_counter()
            try:
                run(event, trainer)
            finally:
                self.here("event", name, began, perf_counter() - began, getattr(event, "iter", None))

        return watched

    def watch_handler(
        self,
        event_name: str,
        name: str,
        priority: int,
        passes: Callable[[Event], bool] | None,
        clocked: Clocked,
    ) -> Clocked:
        """Return `clocked`, the clocked call of a handler, so that each call leaves a span."""

        def watched(event: Event, trainer: Any, weight: int) -> None:
            if passes is not None and not passes(event):
                return
            began = perf_counter()
            try:
                clocked(event, trainer, weight)
            finally:  # the thread is named by the event's own span
                took, iteration = perf_counter() - began, getattr(event, "iter", None)
                self.add(Span(get_ident(), "handler", name, began, took, iteration, event_name, priority))

        return watched

    def _lose(self) -> None:
        with self._counting:
            self.lost += 1
