"""Deliver events to one background subscriber, handle its errors, flush it and end it.

A subscriber has three parts: the `Account` counts its events, the `Inbox` queues them, and the `Runner` has
the thread, task or process that delivers them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from eventloop.background.queues.account import Account, Counts
from eventloop.background.queues.inbox import Inbox, Route
from eventloop.background.queues.options import SubscriberOptions
from eventloop.background.queues.runner import Delivery, Flush, Runner
from eventloop.background.queues.when_filter import WhenFilter
from eventloop.costs.spans import SpanRecorder
from eventloop.costs.timing import Timing
from eventloop.costs.waits import waiting
from eventloop.events import Event
from eventloop.events.deferred import Timed, timed
from eventloop.events.encoding_errors import Unencodable, bad_events
from eventloop.util.text import error_text
from eventloop.util.waiting import Bell

logger = logging.getLogger("eventloop")

HELD_SECONDS = 0.1
"""The seconds of a delivery after which events beyond the queue's capacity go to temporary files."""
FILTER_SECONDS = 0.2
"""The longest wait in seconds, before the counts are read, until `when=` was called for the last events."""
_CHECK_SECONDS = 0.05
"""The interval in seconds at which a thread that waits for room wakes the subscriber."""


class Subscriber:
    """A background subscriber with its account, its inbox and its runner.

    Args:
        name: the subscriber's name.
        fn: the handler.
        options: the options of the queue and its deliveries.
        report: called for each failure.
    """

    runner: Runner
    """The runner, which is set after `__init__` by the function that creates the subscriber."""

    def __init__(self, name: str, fn: Callable[..., Any], options: SubscriberOptions, report: Report) -> None:
        self.name, self.fn, self.options = name, fn, options
        self.account = Account(name)
        self.closed = self.account.closed
        self.inbox = Inbox(self.account, options, self.fail)
        self.filter: WhenFilter | None = None
        self.busy = Timing()  # the times of its deliveries
        self.recorder: SpanRecorder | None = None
        self.no_more = False  # whether to end once the queue is empty
        self.room = Bell()  # wakes the threads that wait for room in the queue
        self.left: Iterator[Event] = iter(())  # the events that a close has left undelivered
        self.left_in = ""  # a text about the call that was under way when a close ended
        self.waited_in_vain = 0.0, 0.0  # the begin of a delivery, and the seconds of vain waits for its end
        self.behind_since = perf_counter()  # the last time at which no event waited in `incoming`
        self._inherited = False  # whether this process is a fork of the one that created the subscriber
        self._closing = False  # whether a close waits for the end
        self._flushes: deque[Flush] = deque()
        self._report = report

    def set_routes(self, routes: dict[type[Event], Route]) -> None:
        """Set the event types that the subscriber receives, with their filters."""
        self.inbox.routes = routes
        if self.filter is None and any(route.late is not None for route in routes.values()):
            self.filter = WhenFilter(self.inbox, lambda: self.runner.wake(), self.fail)

    # --- the account (any thread) --------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Return whether the subscriber accepts no more events."""
        return self.account.done

    @property
    def ended(self) -> bool:
        """Return whether the subscriber has ended, so that a close need not wait for it."""
        return self.account.ended_by == "stalled" or self.closed.is_set()

    @property
    def held(self) -> bool:
        """Return whether the current delivery or callback has taken longer than `HELD_SECONDS`."""
        began = self.runner.began
        return bool(began) and perf_counter() - began > HELD_SECONDS

    @property
    def counts(self) -> Counts:
        """Return a copy of the counters, exact at the moment of the call.

        Filters and the overflow policy are applied before, to the events emitted so far, unless that takes
        long.
        """
        account, inbox = self.account, self.inbox
        if self.filter is not None:
            self.filter.wait(FILTER_SECONDS)
        elif inbox.incoming and (not inbox.spills or self.held):
            inbox.move(own=False)
        with account.lock:
            inbox.drop_late()
            queued, delivered = inbox.queued(), account.delivered + account.progress[0]
            account.peak = max(account.peak, queued - account.in_flight)
            return Counts(
                account.calls,
                account.seconds,
                delivered,
                account.dropped,
                account.failed,
                queued,
                account.peak,
                inbox.spill.total,
                min(account.unconfirmed, delivered),
            )

    @property
    def queued(self) -> int:
        """Return the number of emitted events that are not yet delivered, failed or dropped."""
        return self.counts.queued

    @property
    def emitted(self) -> int:
        """Return the number of events emitted for this subscriber."""
        with self.account.lock:
            return self.account.received + self.inbox.waiting()

    def new_losses(self) -> str:
        """Describe the dropped and failed events; "" if there are no more than at the last call."""
        return self.account.new_losses(self.counts)

    def new_drops(self, now: float, every_seconds: float) -> int:
        """Return the number of events dropped since the last report, or 0 within `every_seconds` after it."""
        with self.account.lock:
            self.inbox.drop_late()
            return self.account.new_drops(now, every_seconds)

    def continue_from(self, former: Subscriber) -> None:
        """Begin with the counts and times of a subscriber that has ended, before the first delivery."""
        self.set_routes(former.inbox.routes)
        if not former._inherited:
            counts = former.counts
            self.account.continue_from(former.account, counts)
            self.inbox.spill.total = counts.spilled
            self.busy, self.inbox.waits = former.busy, former.inbox.waits

    def abandon_in_child(self) -> None:
        """End the subscriber in a forked child process, whose parent alone has the delivering thread."""
        self.account.lock = threading.RLock()  # the parent's thread may have held the lock at the fork
        self._inherited = True
        self.closed.set()
        self.runner.abandon_in_child()

    # --- queuing (any thread) ------------------------------------------------------------------------------

    def enqueue(self, event: Event) -> None:
        """Queue an event that the background created, such as a health event, if it passes the filters."""
        self.inbox.incoming.extend(self.inbox.wanted([event]))
        self.runner.wake()

    def wait_for_room(self) -> None:
        """Wait while the queue is full and the subscriber has not ended, for overflow="block"."""
        if self._has_room():
            return
        with waiting("background", self.name):
            self.runner.wake()
            while not self.room.wait_for(self._has_room, _CHECK_SECONDS):
                self.runner.wake()

    def _has_room(self) -> bool:
        return self.done or self.queued < self.inbox.capacity

    # --- flushing and ending (any thread) ------------------------------------------------------------------

    def request_flush(self, *, calls: bool = True) -> Flush:
        """Request a flush after all events emitted so far, and return the request.

        Args:
            calls: whether to call `on_flush`; if False, the flush only shows that the events are handled.
        """
        with self.account.lock:
            after = self.account.received + self.inbox.waiting() - self.account.dropped_at_end
            flush = Flush(after, calls=calls)
            self._flushes.append(flush)
        if self.done:
            flush.made.set()
        self.runner.wake()
        return flush

    def drain(self) -> None:
        """Let the runner deliver without pauses, because a close waits."""
        self._closing = True
        self.runner.wake()

    def request_close(self) -> None:
        """Ask the subscriber to end once its queue is empty."""
        self._closing = self.no_more = True
        self.runner.wake()

    def wait_closed(self, timeout: float) -> bool:
        """Wait until the subscriber has ended, with or without an error; return False on a timeout."""
        return self.ended or self.closed.wait(timeout)

    def give_up(self, reason: str) -> None:
        """Accept no more events, count the queued events as dropped, and release all waiting threads.

        Args:
            reason: the reason of the end, such as "error" (`Account.ended_by`).
        """
        account, inbox = self.account, self.inbox
        with account.lock:
            if account.ended_by:
                return
            account.ended_by = reason
            inbox.drop_late()
            account.dropped += inbox.queued() - account.in_flight + account.progress[0]
            inbox.buffer.clear()
        inbox.spill.discard()
        self.release_waiters()

    def break_off(self, error: BaseException | None) -> None:
        """End the subscriber because eventloop's own delivery code failed, or its thread has ended.

        Args:
            error: the error; None if the thread has ended for an unknown reason.
        """
        self.runner.release()
        with self.account.lock:
            self.account.failed += self.account.end_run()
            self.runner.began = 0.0
        reason = f"its deliveries ended with a {type(error).__name__}" if error else "its thread has ended"
        self.account.last_error = error_text(RuntimeError(reason))
        try:  # a logging handler may raise an error too, even SystemExit
            logger.error(
                "background subscriber %s cannot go on; please report this: %s",
                self.name,
                reason,
                exc_info=error,
            )
            self.report(RuntimeError(reason), None, 0.0)
        finally:
            self.give_up("error")
            self.finish()

    def release_waiters(self) -> None:
        """Release all threads that wait for a flush or for room, and wake the runner."""
        for flush in tuple(self._flushes):
            flush.made.set()
        self.room.ring()
        self.runner.wake()

    # --- delivering (the runner's thread or task) ----------------------------------------------------------

    def is_draining(self) -> bool:
        """Return whether to deliver without pauses: a flush or close waits, or the queue becomes full."""
        is_awaited = self._closing or bool(self._flushes) or bool(self.account.ended_by)
        count = len(self.inbox.buffer) + len(self.inbox.incoming)
        return is_awaited or count > self.inbox.capacity // 4 or self.inbox.spill.count > 0

    def lingers(self) -> bool:
        """Return whether to deliver later, so that the delivery has more events (option `linger`)."""
        linger = self.options.linger
        return linger > 0 and perf_counter() - self.inbox.popped_at < linger and not self.is_draining()

    def next_delivery(self) -> Delivery | list[Timed] | None:
        """Remove the next event or batch from the queue, for a delivery that begins now; None without one."""
        most = self.runner.most
        events = self.inbox.pop(most or 1)
        if not events:
            return None
        self.runner.began = perf_counter()
        if self.options.timed:
            return timed(events)
        return events if most else events[0]

    def end_delivery(self, error: BaseException | None) -> float:
        """Count the delivery that just ended, and return its seconds."""
        account, runner = self.account, self.runner
        with account.lock:
            began, elapsed = runner.began, perf_counter() - runner.began
            needs_item = error is not None or self.recorder is not None
            item = runner.current() if needs_item else None
            count, runner.began = account.in_flight, 0.0
            account.end_calls(1, elapsed, count, error)
        self.busy.add(elapsed)
        account.unconfirmed = runner.unconfirmed()
        if self.recorder is not None:
            self.record(self.recorder, item, began, elapsed)
        if error is not None and count:  # `count` is 0 if the delivery was reported as stalled before
            self.fail(error, item, elapsed)
        if self.options.overflow == "block":
            self.room.ring()
        self.flush_if_due()
        return elapsed

    def record(self, recorder: SpanRecorder, item: Delivery | None, began: float, seconds: float) -> None:
        """Record a delivery as a span, and the present depth of the queue."""
        if item is not None:
            recorder.delivered(self.name, self.runner.runs_on, item, began, seconds)
            recorder.depth(self.name, self.queued)

    def record_current(self, recorder: SpanRecorder, now: float) -> None:
        """Record the current delivery, which has not ended."""
        with self.account.lock:
            _, seconds, callback = self.runner.call()
            item = self.runner.current()
        if seconds and not callback and item is not None:
            recorder.delivered(self.name, self.runner.runs_on, item, now - seconds, seconds, "(under way)")

    def flush_if_due(self) -> None:
        """Make the requested flushes whose events are handled."""
        while self._flushes:
            account = self.account
            with account.lock:
                # without `dropped_at_end`, because events dropped there may be newer than the flush
                handled = account.handled - account.dropped_at_end
                due = not self.inbox.queued() or handled >= self._flushes[0].after
            if not due:
                return
            flush = self._flushes.popleft()
            if not self.runner.forward_flush(flush):
                if flush.calls:
                    self.call_back(self.options.on_flush, "on_flush")
                flush.made.set()

    def finish(self) -> None:
        """Call `on_close`, and mark the subscriber as ended."""
        account = self.account
        if account.ended_by != "stalled":
            self.call_back(self.options.on_close, "on_close")
        with account.lock:
            # after a close at its deadline these events count as undelivered instead
            if account.unconfirmed and account.ended_by != "closed":
                self.account.losses_logged = not (account.failed or account.dropped)  # `on_close` logs these
                account.failed += account.unconfirmed
                account.delivered -= account.unconfirmed
                account.unconfirmed = 0
        self.closed.set()
        self.release_waiters()

    def call_back(self, callback: Callable[[], object] | None, what: str) -> None:
        """Call a callback of the name `what`, such as "on_flush", and report its error."""
        if callback is None:
            return
        failure: BaseException | None = None
        runner = self.runner
        with self.account.lock:
            runner.began, runner.callback = perf_counter(), what
        try:
            callback()
        except BaseException as error:  # also a SystemExit, which must not end the runner
            failure = error
        with self.account.lock:
            was_reported = not runner.callback  # as stalled
            runner.began, runner.callback = 0.0, ""
        self.account.unconfirmed = runner.unconfirmed()
        if failure is not None and not was_reported:
            self.fail_callback(failure, what)

    # --- failures ------------------------------------------------------------------------------------------

    def fail(self, error: BaseException, item: Delivery | None, elapsed: float = 0.0) -> None:
        """Report a failed delivery, whose events are counted; with on_error="disable" end the subscriber."""
        self.account.last_error = error_text(error)
        if unencodable := bad_events(error, len(item) if isinstance(item, list) else 1):
            # the subscriber has no fault and continues, even with on_error="disable"
            if new := self.account.log_unencodable(unencodable):
                error_type = type(error) if isinstance(error, Unencodable) else Unencodable
                self.report(error_type(new, len(new)), item, elapsed)
            return
        disable = self.options.on_error == "disable"
        self.account.log_failure(error, disable=disable)
        self.report(error, item, elapsed)  # before `give_up`, so that a thread that waits finds the report
        if disable:
            self.give_up("error")

    def fail_callback(self, error: BaseException, what: str) -> None:
        """Report an error of the callback `what`, such as "on_flush"; no event counts as failed for it."""
        if self.options.on_error == "raise":
            error.add_note(f"raised by background subscriber {self.name} ({self.runner.runs_on}) in {what}")
        self.account.log_callback(error, what)
        self.report(error, None, 0.0)

    def report(self, error: BaseException, item: Delivery | None, seconds: float) -> None:
        """Report a failure as a health event."""
        self._report(self, error, item, seconds)


Report = Callable[[Subscriber, BaseException, Delivery | None, float], None]
"""The type of a function that is called for each failure: subscriber, error, delivery and its seconds."""
