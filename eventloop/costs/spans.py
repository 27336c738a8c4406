"""Record a part of a run: spans of time, each with its thread, begin and duration, and depths of queues.

    recorder = SpanRecorder()
    with bus.record(recorder) as recording:
        trainer.train()
    recording.wait(1.0)
    print(len(recorder.spans), recorder.lost)

While a recorder is on a bus, each event, handler call and delivery adds a span to it; see `Bus.record`.
A span costs two reads of the clock and an append. All times are in seconds, by `perf_counter`.
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
from eventloop.util.checks import at_least

LIMIT = 100_000
"""The default limit of the number of spans, and of the number of depths, in a recorder: about 15 MB each."""

SAVER = "checkpoint saver"
"""The `track` of the spans of the thread or process that writes checkpoints."""

Kind = Literal["iteration", "phase", "event", "handler", "wait", "delivery", "save"]
Run = Callable[[Event, Any], None]


class Span(msgspec.Struct, gc=False, frozen=True):
    """A part of a run's time with a name, such as one call of a handler."""

    track: int | str
    """The `get_ident` of a thread, or the name of a background subscriber."""
    kind: Kind
    name: str
    began: float
    seconds: float
    iter: int | None = None
    event: str = ""
    """The name of the event of a handler's call or of a delivery; "" for a batch of several event types.

    For a wait it is the name of the subscriber or other object that the thread waited for.
    """
    number: int = 0
    """The priority of a handler, or the number of events in a delivery."""


class Depth(msgspec.Struct, gc=False, frozen=True):
    """The number of events in a queue at one time."""

    queue: str
    """The name of the background subscriber."""
    at: float
    events: int


class SpanRecorder:
    """Collect spans and queue depths from any thread, without a lock.

    Args:
        limit: the largest number of spans, and of depths, to keep. The others are counted in `lost`.

    Raises:
        TypeError, ValueError: `limit` is not a positive int.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        at_least("limit", limit, 1)
        self.limit = limit
        self.spans: list[Span] = []
        """The spans in the order of their ends."""
        self.depths: list[Depth] = []
        self.threads: dict[int, str] = {}
        """The names of the threads that have spans, by `get_ident`."""
        self.lanes: dict[str, RunsOn] = {}
        """The names of the background subscribers that have spans, and where each of them runs."""
        self.lost = 0
        """The number of spans and depths that were not kept because of the limit."""
        self._counting = threading.Lock()  # guards `lost`

    def add(self, span: Span) -> None:
        """Add a span, or count it as lost beyond the limit."""
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
        self,
        kind: Kind,
        name: str,
        began: float,
        seconds: float,
        iter: int | None,
        *,
        event: str = "",
        number: int = 0,
    ) -> None:
        """Record a span of the calling thread; the arguments are the fields of a `Span`."""
        thread = get_ident()
        if thread not in self.threads:
            self.threads[thread] = threading.current_thread().name
        self.add(Span(thread, kind, name, began, seconds, iter, event, number))

    def delivered(
        self,
        lane: str,
        runs_on: RunsOn,
        item: Event | list[Event],
        began: float,
        seconds: float,
        note: str = "",
    ) -> None:
        """Record a delivery to a background subscriber.

        Args:
            lane: the name of the subscriber.
            item: the event, or the list of events of a batch.
            note: a text that the name of the span ends with.
        """
        self.lanes[lane] = runs_on
        events = item if isinstance(item, list) else [item]
        types = {type(event) for event in events}
        name = event_name(types.pop()) if len(types) == 1 else ""
        iteration = getattr(events[-1], "iter", None) if events else None
        label = name if isinstance(item, Event) else f"{len(events)} × {name or 'events'}"
        self.add(
            Span(lane, "delivery", f"{label} {note}".rstrip(), began, seconds, iteration, name, len(events))
        )

    # --- wrappers around the functions that dispatch events ------------------------------------------------

    def watch_event(self, name: str, run: Run) -> Run:
        """Return a function that calls `run`, which dispatches the event `name`, and records each call."""

        def watched(event: Event, trainer: Any) -> None:
            """Dispatch the event and record a span, also if a handler raises an error."""
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
        clocked: Run,
    ) -> Run:
        """Return a function that calls `clocked`, which runs a handler, and records each call as a span.

        Args:
            event_name: the name of the event.
            name, priority: the handler's name and priority.
            passes: the handler's filter, which is checked first; None without a filter.
            clocked: calls the handler and measures the call.
        """

        def watched(event: Event, trainer: Any) -> None:
            """Run the handler and record a span, if the event passes its filter."""
            if passes is not None and not passes(event):
                return
            began = perf_counter()
            try:
                clocked(event, trainer)
            finally:
                seconds, iteration = perf_counter() - began, getattr(event, "iter", None)
                # not by `here`, which would look up the thread's name once more: `watch_event` has done so
                self.add(Span(get_ident(), "handler", name, began, seconds, iteration, event_name, priority))

        return watched

    def _lose(self) -> None:
        """Count a span or depth that is not kept."""
        with self._counting:
            self.lost += 1
