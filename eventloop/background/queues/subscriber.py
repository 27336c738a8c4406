"""Deliver to one background subscriber: handle its errors, flush it and end it.

`eventloop.background.runners` and `workers` add the task, thread or process that delivers.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter
from typing import Any, ClassVar

from eventloop.background.queues.filter_watchdog import HANGS_SECONDS
from eventloop.background.queues.flush_tokens import Flushes, InVain
from eventloop.background.queues.options import LaneOptions
from eventloop.background.queues.queue import Delivery, LaneQueue
from eventloop.background.queues.wakeup import Doorbell
from eventloop.costs.counting import DELIVERY_PERIOD, WARM_UP
from eventloop.costs.records import RunsOn
from eventloop.costs.sampling import Budget, Timing
from eventloop.costs.spans import SpanRecorder
from eventloop.events import Event
from eventloop.events.encoding_errors import BadEvent, Unencodable, bad_events
from eventloop.events.filters import Passes
from eventloop.util.text import UnavailableError, error_text

logger = logging.getLogger("eventloop")

STUCK_SECONDS = 1.0
"""A delivery of so many seconds that a thread has waited for in vain is logged as stuck."""


class Lane(LaneQueue, ABC):
    """The queue of a subscriber, its account, and its deliveries; subclasses take the events out."""

    runs_on: ClassVar[RunsOn]

    def __init__(self, name: str, fn: Callable[..., Any], options: LaneOptions, report: Report) -> None:
        super().__init__(name, options)
        self.busy = Timing()  # of sampled deliveries; the longest is that of all
        self.budget: Budget | None = None
        self.recorder: SpanRecorder | None = None
        self.doorbell = Doorbell()  # of the background that it is in, once there is one
        self.last_error = ""
        self._fn = fn
        self._report = report
        self._calling = ""  # the callback under way, unless it was told that it stalled
        self._closing = False  # somebody waits for its end
        self._no_more = False  # nothing comes any more: with an empty queue it ends
        self._flushes = Flushes()
        self._in_vain = InVain()
        self._named: set[tuple[str, str]] = set()  # kinds of events that cannot be encoded, which the log has

    def succeed(self, former: Lane) -> None:
        """Continue the account and the timings of a subscriber that has ended, before the first delivery."""
        self.go_on_from(former)
        self._spill.total = former.spilled
        self.busy, self.waits.timing, self.budget = former.busy, former.waits.timing, former.budget
        self.paused, self.last_error = former.paused, former.last_error

    def leave_out(self, why: str) -> None:
        """Exclude this subscriber from the reopened bus."""
        self.ended_by, self.last_error = "stalled", why

    @property
    def idle(self) -> bool:
        """Return whether nothing is queued or under way."""
        return self.done or not (self.queued or self._calling)

    @property
    def blocked_by_caller(self) -> bool:
        """Return whether nothing is delivered while this thread waits."""
        return False

    @property
    def ended(self) -> bool:
        """Return whether a close need not wait for it any more."""
        return self.ended_by == "stalled" or self.closed.is_set()

    # --- draining and ending -------------------------------------------------------------------------------

    def flush_soon(self, *, calls: bool = True) -> int:
        """Ask for a flush once everything accepted so far is out of the queue; return its number.

        Args:
            calls: whether to call `on_flush`; else the flush only marks that point.
        """
        with self._account:
            number = self._flushes.ask(self.routed, calls=calls)
        self.wake()
        return number

    def wait_flushed(self, timeout: float, number: int | None = None) -> bool:
        """Wait for a flush, by default the last one; return False on a timeout."""
        wanted = self._flushes.asked if number is None else number
        return self._flushes.wait(wanted, lambda: self.done, timeout)

    def hurry(self) -> None:
        """Deliver without pauses, and wake the loop whenever the queue is empty: a close waits."""
        self._closing = True
        self.wake()

    def close_soon(self) -> None:
        """End once the queue is empty."""
        self._closing = self._no_more = True
        self.wake()

    def waited_in_vain(self, seconds: float) -> None:
        """Note that a caller waited so many seconds for the delivery under way, and gave up."""
        began, took = self._under_way()
        if began:
            self._in_vain.add(began, min(took, seconds))

    @property
    def waited(self) -> float:
        """Return how many seconds callers waited in vain for the delivery still under way."""
        began, _ = self._under_way()
        return self._in_vain.waited(began) if began else 0.0

    @property
    def stuck(self) -> str:
        """Describe the delivery or callback that a caller waited for in vain, "" if it is not stuck."""
        if not self.waited or self.ended_by == "stalled":  # then it is reported already
            return ""
        _, took = self._under_way()
        return f"stuck for {took:.1f} s in {self._calling or 'one delivery'}" if took >= STUCK_SECONDS else ""

    def _under_way(self) -> tuple[float, float]:
        """Return the begin and the seconds of the delivery or callback under way, zeros without one."""
        began = self._began
        return (began, perf_counter() - began) if began else (0.0, 0.0)

    def wait_closed(self, timeout: float) -> bool:
        """Wait until the queue is empty and `on_close` has run; a stalled subscriber is not waited for."""
        return self.ended or self.closed.wait(timeout)

    def abandon(self) -> None:
        """Stop at the deadline of a close; queued events stay in the account as left."""
        if not self.done:
            self.ended_by = "closed"
            self._notify()
        with self._account:
            self._spill.discard()
        self.release()

    def release(self) -> None:
        """Close the spill file of a subscriber that has ended."""
        if self.done:
            self._spill.release()

    def give_up(self, reason: str) -> None:
        """Take no more events, count queued ones as dropped, and release all waiting threads."""
        with self._account:
            if self.ended_by:
                return
            self.ended_by = reason
            self.dropped += len(self.buffer) + self._spill.count
            self.buffer.clear()
            self._spill.discard()
        self._notify()

    def check(self, now: float) -> None:
        """Give up the subscriber if its code has run longer than its `stall_timeout`.

        That may be a delivery, `on_flush`, `on_close`, or the filter, in which another thread hangs.
        """
        limit = self.options.stall_timeout
        for took, event in self._asking.give_up(now, limit):
            self._filter_hangs(event, took, f"spent more than stall_timeout={limit:g} s in its when=")
            self.give_up("error")  # its own thread does not hang, and may come to its end
        self.check_stall(now)

    def end_asking(self) -> None:
        """Report a filter that has not returned at the end of a close, and do not call it again."""
        for took, event in self._asking.give_up(perf_counter(), HANGS_SECONDS):
            self._filter_hangs(event, took, f"was still in its when= when the bus closed, after {took:.2g} s")

    def _filter_hangs(self, event: Event, took: float, what: str) -> None:
        self._mute = True
        self._charge_failure()
        self._stalled_in(f"subscriber {self.name} {what}; the filter is not called again", event, took)

    def check_stall(self, now: float) -> None:
        """Give up a subscriber whose delivery or callback has lasted longer than its `stall_timeout`."""
        began, limit = self._began, self.options.stall_timeout
        if not began or now - began <= limit or (self.ended_by and not self._calling):
            return
        with self._account:
            calling = self._calling
            if self._began != began or not (self._in_flight or calling):
                return  # it ended, or another thread saw the same stall
            self.failed += self._in_flight
            self._in_flight, self._calling = 0, ""
            item = self._item
        self._stalled_in(
            f"subscriber {self.name} spent more than stall_timeout={limit:g} s "
            f"{f'in {calling}' if calling else 'on one delivery'}; it is no longer waited for",
            item, now - began,
        )  # fmt: skip
        self.give_up("stalled")
        if calling:
            self.ended_by = "stalled"  # also of one that had failed, or was cancelled, and comes to no end

    def _stalled_in(self, text: str, item: Delivery | None, took: float) -> None:
        self.last_error = text
        logger.error("%s", text)
        self._report(self, TimeoutError(text), item, took)

    def break_off(self, error: BaseException) -> None:
        """End the subscriber because delivering itself failed, e.g. over an error that cannot be printed."""
        logger.error("background subscriber %s cannot go on; please report this", self.name, exc_info=error)
        with self._account:
            self.failed += self._in_flight
            self._in_flight = 0
        failure = RuntimeError(f"its deliveries ended with a {type(error).__name__}")
        self.last_error = error_text(failure)
        self._report(self, failure, None, 0.0)
        self.give_up("error")
        self._finish()

    @abstractmethod
    def wake(self) -> None:
        """Make the delivering side look at the queue; safe from any thread."""

    def _notify(self) -> None:
        self._flushes.let_go()
        self._room.ring()
        self.wake()

    # --- the lane's own side -------------------------------------------------------------------------------

    def _delivered(self, error: BaseException | None) -> float:
        """Account for the delivery that just ended, and return its seconds."""
        with self._account:
            began, took = self._began, perf_counter() - self._began
            count, self._in_flight, self._began = self._in_flight, 0, 0.0
            item, self._item = self._item, None
            self.calls += 1
            self.seconds += took
            if error is None:
                self.delivered += count
            else:
                self._charge(error, count)
        if self.calls <= WARM_UP:
            self._took(took)
        elif not self.calls % DELIVERY_PERIOD:
            self._took(took, DELIVERY_PERIOD)
        self.busy.longest = max(self.busy.longest, took)
        if self.recorder is not None:
            self._record(self.recorder, item, began, took)
        if error is not None and count:  # 0: it was counted and told when it stalled
            self._failure(error, item, took)
        if self.options.overflow == "block":
            self._room.ring()
        self._flush_if_due()
        return took

    def _record(self, recorder: SpanRecorder, item: Delivery | None, began: float, seconds: float) -> None:
        if item is not None:
            recorder.delivered(self.name, self.runs_on, item, began, seconds)
            recorder.depth(self.name, self.queued)

    def tell_under_way(self, recorder: SpanRecorder, now: float) -> None:
        """Record a delivery that has not ended."""
        with self._account:
            began, item = self._began, self._item
        if began and item is not None:
            recorder.delivered(self.name, self.runs_on, item, began, now - began, "(under way)")

    def _took(self, seconds: float, weight: int = 1) -> None:
        """Add the time of one delivery, which stands for `weight` deliveries, to the distribution."""
        self.busy.add(seconds, weight)
        if self.budget is not None:
            self.budget.look(seconds, self.busy)

    def _failure(self, error: BaseException, item: Delivery | None, took: float) -> None:
        self.last_error = error_text(error)
        if bad := bad_events(error, len(item) if isinstance(item, list) else 1):
            # no fault of the subscriber: it goes on, whatever `on_error` says
            if new := self._name(bad):
                self._report(self, Unencodable(new, len(new)), item, took)
            return
        disable, failures = self.options.on_error == "disable", self.failed
        if disable or failures & (failures - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            self._tell(error, failures, disable=disable)
        self._report(self, error, item, took)  # first: who waits for the lane to end finds the report
        if disable:
            self.give_up("error")

    def _tell(self, error: BaseException, failures: int, *, disable: bool) -> None:
        what = "and is disabled" if disable else f"({failures} failures so far)"
        if not isinstance(error, UnavailableError):
            logger.error("background subscriber %s failed %s", self.name, what, exc_info=error)
            return
        rest = "; the run goes on without it, and its events count as failed or dropped" if disable else ""
        logger.warning("background subscriber %s failed %s: %s%s", self.name, what, error, rest)

    def _name(self, events: list[BadEvent]) -> list[BadEvent]:
        """Log each kind of event and field once, and return those that are new."""
        new = [bad for bad in events if (bad.event, bad.field) not in self._named]
        for bad in new:
            if (bad.event, bad.field) not in self._named:
                self._named.add((bad.event, bad.field))
                logger.error(
                    "%s: %s. This event failed, and others like it will; all others are delivered. Give the "
                    "event plain fields: numbers, texts, bytes, and lists and mappings of them",
                    self.name, bad,
                )  # fmt: skip
        return new

    def _flush_if_due(self) -> None:
        if self._flushes:
            with self._account:  # what is turned away is entered in two steps
                number, calls = self._flushes.take(self.handled)
            if number:
                self._flush(number, calls=calls)

    def _flush(self, number: int, *, calls: bool) -> None:
        if calls:
            self._call_back(self.options.on_flush, "on_flush")
        self._flushes.made(number)

    def _finish(self) -> None:
        if self.ended_by != "stalled":
            self._call_back(self.options.on_close, "on_close")
        self._spill.release()  # before who waits for the end looks
        self.closed.set()
        self._flushes.let_go()
        self.release()
        if self._closing:
            self.doorbell.ring()

    def _call_back(self, callback: Callable[[], object] | None, what: str) -> None:
        if callback is None:
            return
        failure: BaseException | None = None
        before = self.doorbell.newest()
        with self._account:
            self._began, self._calling = perf_counter(), what
        try:
            callback()
        except BaseException as error:  # a SystemExit in a subscriber is its own affair
            failure = error
        self.doorbell.look(before)
        with self._account:
            stalled = not self._calling
            self._began, self._calling = 0.0, ""
        if failure is not None and not stalled:  # else it was told when it stalled
            self.complain(failure, what)

    def complain(self, error: BaseException, what: str) -> None:
        """Report an error of a callback, which no event caused."""
        self.last_error = f"{error_text(error)} (in {what})"
        if self.options.on_error == "raise":
            error.add_note(f"raised by background subscriber {self.name} ({self.runs_on}) in {what}")
        logger.error("background subscriber %s failed in %s", self.name, what, exc_info=error)
        self._report(self, error, None, 0.0)


Report = Callable[[Lane, BaseException, Delivery | None, float], None]
"""Called for each failure with the subscriber's queue, the error, the delivery and its seconds."""


class Route:
    """The interest of one subscriber in one type of event."""

    __slots__ = ("lane", "passes")

    def __init__(self, lane: Lane, passes: Passes | None) -> None:
        self.lane = lane
        self.passes = passes
