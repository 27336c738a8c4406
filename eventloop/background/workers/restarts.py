"""Restart a worker process that dies, kill a worker that hangs, and stop after too many deaths.

`eventloop.background.workers.subscriber` derives from it, and describes the effects for the subscriber.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from time import monotonic
from typing import Any

from eventloop.background.queues.failures import Report
from eventloop.background.queues.flush import Flush
from eventloop.background.queues.options import LaneOptions
from eventloop.background.queues.queue import Delivery
from eventloop.background.queues.subscriber import Lane
from eventloop.background.workers.in_flight import Flights
from eventloop.costs.spans import SpanRecorder
from eventloop.events.base import event_name
from eventloop.events.deferred import Queued, unstamped
from eventloop.processes.child import WorkerProcess
from eventloop.processes.cpu_time import computes, of_process
from eventloop.util.text import error_text
from eventloop.util.waiting import Latch

logger = logging.getLogger("eventloop")

DEATHS_IN_A_ROW = 3
DEATHS = 20
RESTART_SECONDS = 0.1
"""The pause before the second restart in a row, doubled for each further one; the first has no pause."""
START_SECONDS = 120.0
"""The seconds after which a worker that imports its handler is killed, unless it has computed in them."""
_ACK_SLACK = 0.1
"""The longest time in seconds from the end of a delivery to its acknowledgement."""
_LOOK_SECONDS = 1.0


class SupervisedLane(Lane):
    """The queue of a subscriber with a worker process: supervise the worker.

    All methods of this class are called on the subscriber's own thread.
    """

    runs_on = "process"
    _thread: threading.Thread

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        options: LaneOptions,
        report: Report,
        *,
        most: int,
        calls: frozenset[str],
    ) -> None:
        super().__init__(name, fn, options, report)
        self.worker: WorkerProcess | None = None
        self.deaths = 0
        self._together = most  # the largest batch; 0 if events are sent one by one
        self._calls_back = calls  # those of "on_flush" and "on_close" that the worker has to call
        self._flights = Flights()
        self._close_sent = self._finished = False
        self._since = 0.0  # when the worker's delivery or callback under way, or its start, began
        self._start_cpu = 0.0  # the worker's CPU time when its start was last looked at
        self._in_a_row = 0
        self._start_at = 0.0
        self._unflushed: deque[Flush] = deque()  # flushes that the worker was asked for and has not answered
        self._worker_ready = Latch()
        self._untaken_events: deque[Queued] = (
            deque()
        )  # acknowledged ones that a death of the worker would lose

    @property
    def _ready(self) -> bool:
        return self._worker_ready.is_set()

    @property
    def _busy(self) -> bool:
        return bool(self._flights.sent or self._unflushed or self._close_sent)

    def _under_way(self) -> tuple[float, float]:
        since = self._since
        return (since, monotonic() - since) if self._ready and self._busy else (0.0, 0.0)

    @property
    def doing(self) -> str:
        """Describe what the worker does; before it is ready, its start."""
        return super().doing if self._ready else "its worker process was still importing its modules"

    @property
    def _callback(self) -> str:
        if self._flights.sent:
            return ""
        return "on_flush" if self._unflushed else "on_close" if self._close_sent else ""

    @property
    def in_a_call(self) -> bool:
        """Return whether the worker was sent a delivery, or asked for a callback, and has not answered."""
        return self._busy

    @property
    def at_work(self) -> str:
        """Describe what the worker does; before it is ready, its start."""
        return super().at_work if self._ready else "its worker process is importing its modules"

    def cpu_time(self) -> float:
        """Return the CPU time of the worker process in seconds."""
        worker = self.worker
        return 0.0 if worker is None else of_process(worker.pid)

    @property
    def stuck(self) -> str:
        """Describe the call in which the worker is stuck, or that events wait for its start."""
        if self.ended_by in ("", "closed") and not self._ready and self.queued:
            return self.doing
        return super().stuck

    def _overdue(self) -> float:
        """Return the seconds until the worker's current delivery, callback or start exceeds its limit."""
        if self._ready and not self._busy:
            return float("inf")
        limit = self.options.stall_timeout + _ACK_SLACK if self._ready else START_SECONDS
        return self._since + limit - monotonic()

    def _patience(self) -> float | None:
        return None if self._ready and not self._busy else max(0.0, min(_LOOK_SECONDS, self._overdue()))

    def _still_starts(self) -> bool:
        """Give a worker that is not ready in time as long again if it has computed; return whether it has."""
        if self._ready:
            return False
        before, self._start_cpu = self._start_cpu, self.cpu_time()
        if not computes(before, self._start_cpu, START_SECONDS):
            return False
        self._since = monotonic()
        return True

    def _stalled(self) -> None:
        assert self.worker is not None
        self.worker.end()
        limit = self.options.stall_timeout
        if not self._ready:
            self._lost(f"it got nowhere in its start for {START_SECONDS:g} s")
            return
        if not self._flights.sent:
            self._lost(f"it spent more than {limit:g} s on {'on_close' if self._close_sent else 'on_flush'}")
            return
        flight, took = self._flights.waiting[0], monotonic() - self._since
        error = TimeoutError(
            f"subscriber {self.name} spent more than stall_timeout={limit:g} s on one delivery; its worker "
            "process was killed"
        )
        self._land(len(flight))
        with self._lock:
            self.failed += len(flight)
            self._in_flight -= len(flight)
            self.calls += 1
            self.seconds += took
        if self.options.on_error == "disable":
            self.last_error = str(error)
            logger.error("%s", error)
            self._report(self, error, self._item_of(flight), took)
            self._drop_flights()
            self.give_up("stalled")
            self._finished = True  # set here too, because a cancelled subscriber was given up before
        else:
            self._failure(error, self._item_of(flight), took)
            self._moved()
            self._lost("killed for stalling")

    def _lost(self, how: str) -> None:
        """Handle the death of the worker: end the subscriber, or restart and send events again."""
        self.worker = None
        if self._unflushed:
            self._complain_of_death(how, "on_flush")
            while self._unflushed:
                self._unflushed.popleft().made.set()
        if self._close_sent and not self._flights.waiting:
            self._complain_of_death(how, "on_close")
            self._finished = True
        elif self.ended_by:  # the rest is not wanted
            self._drop_flights()
            self._finished = True
        elif self._died_too_often():
            self._bury(how)
        else:
            self._flights.suspects = self._flights.events
            again = self._flights.events + len(self._untaken_events)
            logger.warning(
                "the worker process of %s died (%s) and is started again; %d events are sent again",
                self.name, how, again,
            )  # fmt: skip

    def _died_too_often(self) -> bool:
        self.deaths += 1
        self._in_a_row += 1
        pause = RESTART_SECONDS * 2 ** (self._in_a_row - 2) if self._in_a_row > 1 else 0.0
        self._start_at = monotonic() + pause
        return self._in_a_row >= DEATHS_IN_A_ROW or self.deaths >= DEATHS

    def _bury(self, how: str) -> None:
        """Count the first unacknowledged delivery, which the workers were handling when they died, as failed.

        The subscriber continues only if `on_error` does not disable it and fewer than `DEATHS` workers have
        died. Otherwise all unacknowledged deliveries have failed, and the subscriber ends.

        Args:
            how: how the last worker ended, for the message.
        """
        flight = self._flights.waiting[0] if self._ready and self._flights.sent else None
        last = self.options.on_error == "disable" or self.deaths >= DEATHS or flight is None
        under_way = self._flights.waiting if last else [flight or []]
        lost = [event for flight in under_way for event in flight]
        waited = self.account.queued - len(lost) if last else 0  # still queued; `_end_by` drops them
        times = f"{self._in_a_row} times in a row" if self._in_a_row > 1 else f"{self.deaths} times"
        over = f" over {_describe(flight[0])}" if flight else "" if self._ready else " before it was ready"
        error = ChildProcessError(
            f"its worker process died {times}{over} (the last: {how}); {len(lost) + waited} events lost"
        )
        with self._lock:
            self.failed += len(lost)
            self._in_flight -= len(lost)
        self._in_a_row = 0
        self._flights.suspects = self._flights.events - len(lost)
        if last:
            self._flights.clear()
            self._end_by(error, self._item_of(lost))
        else:
            self._flights.waiting.popleft()
            self._failure(error, self._item_of(lost), 0.0)
            self._moved()

    def _end_by(self, error: BaseException, item: Delivery | None) -> None:
        """End the subscriber because of an error, for any value of `on_error`."""
        self.last_error = error_text(error)
        self._drop_flights()  # first: a thread that waits for the end finds them counted
        try:  # a handler of the log may raise, too
            logger.error("background subscriber %s failed and is disabled", self.name, exc_info=error)
            self._report(self, error, item, 0.0)
        finally:
            self.give_up("error")
            self._finished = True

    def break_off(self, error: BaseException | None) -> None:
        """End the subscriber and its worker, because the thread that feeds the worker has ended."""
        try:
            if self.worker is not None:
                self.worker.end()
        finally:
            self._drop_flights()
            super().break_off(error)

    def _drop_flights(self) -> None:
        """Count the events that the worker has not acknowledged as dropped."""
        with self._lock:
            self.dropped += self._flights.events
            self._in_flight -= self._flights.events
        self._flights.clear()
        self._moved()

    def _item_of(self, flight: list[Queued]) -> Delivery | None:
        events = [unstamped(event) for event in flight]
        return events if self._together or len(events) != 1 else events[0]

    def _land(self, count: int) -> None:
        self._flights.land(count)
        self._since = monotonic()
        self._in_a_row = 0

    def _keep_untaken(self, count: int, untaken: int) -> None:
        """Keep the last `untaken` of the acknowledged events, of which `count` are acknowledged just now."""
        landing = (item for flight in self._flights.waiting for item in flight)
        self._untaken_events.extend(islice(landing, count))
        while len(self._untaken_events) > untaken:
            self._untaken_events.popleft()
        self.untaken = len(self._untaken_events)

    def _send_untaken_again(self) -> None:
        """Put the events that a dead worker held for its destination before all others."""
        events, size = list(self._untaken_events), self._together or 1
        self._untaken_events.clear()
        with self._lock:
            self.untaken = 0
            self.delivered -= len(events)
            self._in_flight += len(events)
        parts = [events[at : at + size] for at in range(0, len(events), size)]
        self._flights.waiting.extendleft(reversed(parts))

    def _still_untaken(self) -> int:
        return self.untaken  # as the worker says

    def _record_spans(self, recorder: SpanRecorder, count: int, spans: list[tuple[float, float]]) -> None:
        """Record the spans of deliveries that a worker has acknowledged.

        Args:
            recorder: collects the spans.
            count: the number of acknowledged events, which belong to the oldest deliveries.
            spans: the begin and the seconds of the last of these deliveries; fewer than all if recording
                began in between.
        """
        landing: list[list[Queued]] = []
        for flight in self._flights.waiting:
            if count <= 0:
                break
            landing.append(flight)
            count -= len(flight)
        recent = landing[max(0, len(landing) - len(spans)) :]
        for flight, (began, seconds) in zip(recent, spans, strict=False):
            self._record(recorder, self._item_of(flight), began, seconds)

    def tell_under_way(self, recorder: SpanRecorder, now: float) -> None:
        """Record the delivery that the worker has not finished."""
        with suppress(IndexError):  # acknowledged in the meantime
            flight = self._flights.waiting[0]
            if self._flights.sent and (item := self._item_of(flight)) is not None:
                began = now - (monotonic() - self._since)
                recorder.delivered(self.name, self.runs_on, item, began, now - began, "(under way)")

    def _moved(self) -> None:
        if self.options.overflow == "block":
            self._room.ring()

    def _complain_of_death(self, how: str, what: str) -> None:
        """Report that the worker died during a callback, if the worker was given this callback.

        Args:
            how: how the worker ended, for the message.
            what: the name of the callback.
        """
        if what in self._calls_back:
            self.complain(ChildProcessError(f"its worker process died: {how}"), what)


def _describe(item: Queued) -> str:
    event = unstamped(item)
    iteration = getattr(event, "iter", None)
    return event_name(type(event)) + ("" if iteration is None else f" of iteration {iteration}")
