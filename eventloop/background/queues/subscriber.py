"""Deliver events to one background subscriber, handle its errors, flush it and end it.

A subscriber holds three parts: the `Account` counts its events, the `Inbox` queues them, and the `Runner` has
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
"""A delivery longer than this, in seconds, is slow: events beyond the capacity are then spilled."""
FILTER_SECONDS = 0.2
"""The longest wait in seconds for `when=` to check the last events, when the counts are read."""
_CHECK_SECONDS = 0.05
"""The interval in seconds at which a thread that waits for room wakes the subscriber."""


class Subscriber:
    """A background subscriber: its account, its inbox and its runner.

    Args:
        name: its name.
        fn: the handler.
        options: the options of the queue and its deliveries.
        report: called for each failure.
    """

    runner: Runner
    """Delivers the events; whoever creates the subscriber sets it."""

    def __init__(self, name: str, fn: Callable[..., Any], options: SubscriberOptions, report: Report) -> None:
        self.name, self.fn, self.options = name, fn, options
        self.account = Account(name)
        self.closed = self.account.closed
        self.inbox = Inbox(self.account, options, self.fail)
        self.filter: WhenFilter | None = None
        self.busy = Timing()  # of its deliveries
        self.recorder: SpanRecorder | None = None
        self.no_more = False  # whether no more events come, so that an empty queue is the end
        self.room = Bell()
        self.left: Iterator[Event] = iter(())  # undelivered at a close; reads the spill file lazily
        self.left_in = ""  # what it was doing when a close ended without it
        self.waited_in_vain = 0.0, 0.0  # begin of a delivery, and the seconds that callers waited for it
        self.behind_since = perf_counter()  # when the keeper last saw that it had caught up
        self._inherited = False  # whether it is the subscriber of the process that has forked this one
        self._closing = False  # whether a close waits for the end
        self._flushes: deque[Flush] = deque()
        self._report = report

    def set_routes(self, routes: dict[type[Event], Route]) -> None:
        """Set the event types that the subscriber wants, with their filters."""
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
        """Return whether the current delivery has taken longer than `HELD_SECONDS`."""
        began = self.runner.began
        return bool(began) and perf_counter() - began > HELD_SECONDS

    @property
    def counts(self) -> Counts:
        """Return a copy of the counters, exact at the moment of the call.

        Filters and the overflow policy are applied to the emitted events, if this does not take long.
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
        """Return how many events were dropped since the last report; 0 if that is not `every_seconds` old."""
        with self.account.lock:
            self.inbox.drop_late()
            return self.account.new_drops(now, every_seconds)

    def continue_from(self, former: Subscriber) -> None:
        """Continue the account and the timings of a former, ended subscriber, before the first delivery."""
        self.set_routes(former.inbox.routes)
        if not former._inherited:
            counts = former.counts
            self.account.continue_from(former.account, counts)
            self.inbox.spill.total = counts.spilled
            self.busy, self.inbox.waits = former.busy, former.inbox.waits

    def abandon_in_child(self) -> None:
        """Mark in a forked child process that the delivering thread or task exists only in the parent."""
        self.account.lock = threading.RLock()  # that thread may have held it when the process was copied
        self._inherited = True
        self.closed.set()
        self.runner.abandon_in_child()

    # --- queuing (any thread) ------------------------------------------------------------------------------

    def enqueue(self, event: Event) -> None:
        """Queue an event of the background, such as a health event, if it is wanted."""
        self.inbox.incoming.extend(self.inbox.wanted([event]))
        self.runner.wake()

    def wait_for_room(self) -> None:
        """Wait while the queue is full and has not ended, for overflow="block"."""
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
        """Request a flush for the time when everything emitted so far is handled.

        Args:
            calls: whether to call `on_flush` then; without it the flush only marks that point.
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
        """Deliver without pauses, because a close is waiting."""
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
        """Accept no more events, count queued ones as dropped, and release all waiting threads."""
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
        """End the subscriber because the delivery code itself failed, for example on an unprintable error.

        Args:
            error: what ended the code; None if it is unknown, because the thread had ended.
        """
        self.runner.release()
        with self.account.lock:
            self.account.failed += self.account.end_run()
            self.runner.began = 0.0
        how = f"its deliveries ended with a {type(error).__name__}" if error else "its thread has ended"
        self.account.last_error = error_text(RuntimeError(how))
        try:  # a handler of the log may raise, too, even SystemExit
            logger.error(
                "background subscriber %s cannot go on; please report this: %s",
                self.name,
                how,
                exc_info=error,
            )
            self.report(RuntimeError(how), None, 0.0)
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
        """Return whether a flush or close waits for the queue, or it grows faster than it is delivered."""
        wanted = self._closing or bool(self._flushes) or bool(self.account.ended_by)
        count = len(self.inbox.buffer) + len(self.inbox.incoming)
        return wanted or count > self.inbox.capacity // 4 or self.inbox.spill.count > 0

    def lingers(self) -> bool:
        """Return whether waiting events are to wait for others, so that one delivery has more of them."""
        linger = self.options.linger
        return linger > 0 and perf_counter() - self.inbox.popped_at < linger and not self.is_draining()

    def next_delivery(self) -> Delivery | list[Timed] | None:
        """Take the next delivery out of the queue, which begins now; None if the queue is empty."""
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
            used = error is not None or self.recorder is not None
            item = runner.current() if used else None
            count, runner.began = account.in_flight, 0.0
            account.end_calls(1, elapsed, count, error)
        self.busy.add(elapsed)
        account.unconfirmed = runner.unconfirmed()
        if self.recorder is not None:
            self.record(self.recorder, item, began, elapsed)
        if error is not None and count:  # 0: counted and reported when it stalled
            self.fail(error, item, elapsed)
        if self.options.overflow == "block":
            self.room.ring()
        self.flush_if_due()
        return elapsed

    def record(self, recorder: SpanRecorder, item: Delivery | None, began: float, seconds: float) -> None:
        """Record a delivery and the events queued behind it."""
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
        """Flush if a requested flush is due."""
        while self._flushes:
            account = self.account
            with account.lock:
                due = (
                    not self.inbox.queued()
                    or account.handled - account.dropped_at_end >= self._flushes[0].after
                )
            if not due:
                return
            flush = self._flushes.popleft()
            if not self.runner.forward_flush(flush):
                if flush.calls:
                    self.call_back(self.options.on_flush, "on_flush")
                flush.made.set()

    def finish(self) -> None:
        """Call `on_close`, and end."""
        account = self.account
        if account.ended_by != "stalled":
            self.call_back(self.options.on_close, "on_close")
        with account.lock:
            if account.unconfirmed and account.ended_by != "closed":  # else they count as left
                self.account.losses_logged = not (account.failed or account.dropped)  # by `on_close`
                account.failed += account.unconfirmed
                account.delivered -= account.unconfirmed
                account.unconfirmed = 0
        self.closed.set()
        self.release_waiters()

    def call_back(self, callback: Callable[[], object] | None, what: str) -> None:
        """Call `on_flush` or `on_close`, and report its error."""
        if callback is None:
            return
        failure: BaseException | None = None
        runner = self.runner
        with self.account.lock:
            runner.began, runner.callback = perf_counter(), what
        try:
            callback()
        except BaseException as error:  # a SystemExit in a subscriber ends nothing else
            failure = error
        with self.account.lock:
            stalled = not runner.callback
            runner.began, runner.callback = 0.0, ""
        self.account.unconfirmed = runner.unconfirmed()
        if failure is not None and not stalled:  # else it was reported when it stalled
            self.fail_callback(failure, what)

    # --- failures ------------------------------------------------------------------------------------------

    def fail(self, error: BaseException, item: Delivery | None, elapsed: float = 0.0) -> None:
        """Report a failed delivery, which is counted, and end the subscriber with `on_error="disable"`."""
        self.account.last_error = error_text(error)
        if bad := bad_events(error, len(item) if isinstance(item, list) else 1):
            # not the subscriber's fault, so it continues, even with on_error="disable"
            if new := self.account.log_unencodable(bad):
                kind = type(error) if isinstance(error, Unencodable) else Unencodable
                self.report(kind(new, len(new)), item, elapsed)
            return
        disable = self.options.on_error == "disable"
        self.account.log_failure(error, disable=disable)
        self.report(error, item, elapsed)  # before give_up, so that a thread waiting for the end finds it
        if disable:
            self.give_up("error")

    def fail_callback(self, error: BaseException, what: str) -> None:
        """Report an error of a callback such as `on_flush`, for which no event counts as failed."""
        if self.options.on_error == "raise":
            error.add_note(f"raised by background subscriber {self.name} ({self.runner.runs_on}) in {what}")
        self.account.log_callback(error, what)
        self.report(error, None, 0.0)

    def report(self, error: BaseException, item: Delivery | None, seconds: float) -> None:
        """Report a failure as a health event."""
        self._report(self, error, item, seconds)


Report = Callable[[Subscriber, BaseException, Delivery | None, float], None]
"""The type of a function that is called for each failure: subscriber, error, delivery and its seconds."""
