"""Deliver events to one background subscriber, handle its errors, flush it and end it.

`eventloop.background.runners` and `workers` add the task, thread or process that calls the handler.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from time import perf_counter
from typing import Any

from eventloop.background.queues.account import Incoming
from eventloop.background.queues.awaited import AwaitedQueue
from eventloop.background.queues.failures import Report
from eventloop.background.queues.filter_thread import HANGS_SECONDS
from eventloop.background.queues.flush import Flush
from eventloop.background.queues.options import LaneOptions
from eventloop.background.queues.queue import HELD_SECONDS, Delivery
from eventloop.costs.spans import SpanRecorder
from eventloop.costs.timing import Timing
from eventloop.events import Event
from eventloop.events.deferred import Pending, Timed, timed, unstamped
from eventloop.util.text import error_text

logger = logging.getLogger("eventloop")

BEHIND_SECONDS = 1.0
"""The seconds of lagging after which a subscriber's events beyond its capacity go to the spill file."""
BURST = 262_144
"""The largest number of events that wait in memory for a subscriber that is about to deliver: some 90 MB."""

KeepLeft = Callable[[str, Iterable[Event]], bool | None]
"""The type of a function that keeps a subscriber's undelivered events; True if a command can deliver them."""


class Lane(AwaitedQueue):
    """The queue of a subscriber, and its deliveries; subclasses add the thread, task or process."""

    def __init__(self, name: str, fn: Callable[..., Any], options: LaneOptions, report: Report) -> None:
        super().__init__(name, fn, options, report)
        self.busy = Timing()  # of its deliveries
        self.recorder: SpanRecorder | None = None
        self._thread: threading.Thread | None = None  # its own, which delivers; None for a task
        self._closing = False  # whether a close waits for the end
        self._no_more = False  # whether no more events come, so that an empty queue is the end
        self._flushes: deque[Flush] = deque()
        self._left: Iterator[Event] = iter(())  # undelivered at a close; reads the spill file lazily
        self._behind_since = perf_counter()  # when the keeper last saw that it had caught up

    def succeed(self, former: Lane) -> None:
        """Continue the account and the timings of a former, ended lane, before the first delivery."""
        self.set_routes(former.routes)
        if former.forgotten:
            return
        self.go_on_from(former)
        self.busy, self.waits = former.busy, former.waits
        self.last_error = former.last_error

    def leave_out(self, why: str) -> None:
        """Mark the subscriber as stalled, because it does not take part in the reopened bus."""
        self.ended_by, self.last_error = "stalled", why

    @property
    def blocked_by_caller(self) -> bool:
        """Return whether the queue cannot become empty while the calling thread waits for it."""
        return False

    @property
    def ended(self) -> bool:
        """Return whether the subscriber has ended, so that a close need not wait for it."""
        return self.ended_by == "stalled" or self.closed.is_set()

    # --- flushing (any thread) -----------------------------------------------------------------------------

    def flush_soon(self, *, calls: bool = True) -> Flush:
        """Request a flush for the time when everything emitted so far is handled.

        Args:
            calls: whether to call `on_flush` then; without it the flush only marks that point.
        """
        with self._lock:
            after = self.received + self._waiting_outside() - self._turned_away
            flush = Flush(after, calls=calls)
            self._flushes.append(flush)
        if self.done:
            flush.made.set()
        self.wake()
        return flush

    def _flush_if_due(self) -> None:
        """Call `on_flush` if a requested flush is due, on the subscriber's own thread or task."""
        while self._flushes:
            with self._lock:
                handled = self.delivered + self._progress[0] + self.failed + self.dropped - self._turned_away
                due = not self._queued() or handled >= self._flushes[0].after
            if not due:
                return
            self._flush(self._flushes.popleft())

    def _flush(self, flush: Flush) -> None:
        if flush.calls:
            self._call_back(self.options.on_flush, "on_flush")
        flush.made.set()

    # --- ending (any thread) -------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Deliver without pauses, because a close is waiting."""
        self._closing = True
        self.wake()

    def _in_a_hurry(self) -> bool:
        """Return whether a flush or close waits for the queue, or it grows faster than it is delivered."""
        wanted = self._closing or bool(self._flushes) or bool(self.ended_by)
        waiting = len(self.buffer) + len(self.incoming)
        return wanted or waiting > self._capacity // 4 or self._spill.count > 0

    def _gathers(self) -> bool:
        """Return whether waiting events are to wait for others, so that one delivery has more of them."""
        return self._linger > 0 and perf_counter() - self._took_at < self._linger and not self._in_a_hurry()

    def close_soon(self) -> None:
        """Ask the subscriber to end once its queue is empty."""
        self._closing = self._no_more = True
        self.wake()

    def wait_closed(self, timeout: float) -> bool:
        """Wait until the subscriber has ended, with or without an error; return False on a timeout."""
        return self.ended or self.closed.wait(timeout)

    def abandon(self) -> None:
        """Stop at the deadline of a close; undelivered events remain in the account as queued."""
        if not (self.ended or self.blocked_by_caller):
            self.left_in = self.doing or "not ended yet"
        moving = self._feeding.acquire(timeout=HELD_SECONDS)  # else a `when=` hangs
        try:
            with self._lock:
                if self.done:
                    return
                first = [*self._under_way_events(), *(unstamped(item) for item in self.buffer)]
                last = [event for item in self._all_incoming() for event in self._leave(item)]
                self.ended_by = "closed"
        finally:
            if moving:
                self._feeding.release()
        self._left = chain(first, self._spilled(), last)
        self._notify()

    def pass_left_events(self, keep: KeepLeft | None) -> bool | None:
        """Call `keep` with the events that a close left undelivered, including those of the current delivery.

        Return its answer, or None if nothing is kept. Its error is logged, because the close must go on.
        """
        first, answer = next(self._left, None), None
        if keep is not None and first is not None:
            try:
                answer = bool(keep(self.name, chain((first,), self._left)))
            except Exception as error:
                logger.error("%s: its undelivered events cannot be kept: %s", self.name, error_text(error))
        self._left = iter(())
        self._spill.discard()
        return answer

    def _all_incoming(self) -> Iterator[Incoming]:
        while self.incoming:
            yield self._pop_incoming()

    def _leave(self, item: Incoming) -> list[Event]:
        """Return the events that an entry leaves undelivered; those never created are counted as dropped."""
        if not isinstance(item, Pending):
            return [unstamped(item)]
        if item.events is None:
            self._drop_pending(item)
        self.received += len(item.events or ())
        return [unstamped(event) for event in item.events or ()]

    def _spilled(self) -> Iterator[Event]:
        while self._spill.count:
            yield from self._spill.read(self._capacity)[0]

    def _under_way_events(self) -> list[Event]:
        """Return the events that were taken out of the queue, and are neither delivered nor failed yet."""
        count = self._in_flight - self._progress[0]
        return [unstamped(item) for item in self._last_taken[-count:]] if count > 0 else []

    def _item(self) -> Delivery | None:
        """Return the current delivery: an event, or a list of events with `batch`."""
        events = self._under_way_events()
        return (events if self.options.most else events[0]) if events else None

    def give_up(self, reason: str) -> None:
        """Take no more events, count queued ones as dropped, and release all waiting threads."""
        with self._lock:
            if self.ended_by:
                return
            self.ended_by = reason
            self._drop_late()
            self.dropped += self._queued() - self._in_flight + self._progress[0]
            self.buffer.clear()
        self._spill.discard()
        self._notify()

    def _notify(self) -> None:
        for flush in tuple(self._flushes):
            flush.made.set()
        self._room.ring()
        self.wake()

    def keep(self) -> None:
        """Apply the overflow policy if the subscriber is behind, and wake it. Called by the keeper.

        Events beyond the capacity go to the spill file only if the subscriber has been in one delivery for
        long, has not caught up for a second, or has very many events waiting. A file costs more than the
        memory of a short burst.
        """
        if self.done:
            with self._lock:
                self._drop_late()
            return
        now = perf_counter()
        self._behind_since = now if self._caught_up else self._behind_since
        self._caught_up = not self.incoming
        if not (self.incoming or self.buffer):
            return
        behind = now - self._behind_since > BEHIND_SECONDS or len(self.incoming) > BURST
        if not self._spills or self.held or behind:
            self.take_in(own=False)
        if not self._gathers():
            self.wake()

    def check(self, now: float) -> None:
        """Give up the subscriber if its thread has ended, or its code exceeds its `stall_timeout`.

        The code may be a delivery, `on_flush`, `on_close` or `when=`. Called by the keeper.
        """
        self._check_runner()
        limit = self.options.stall_timeout
        if self._end_asking(now - limit, f"spent more than stall_timeout={limit:g} s in its when="):
            self.give_up("stalled")
        self.check_stall(now)

    def _check_runner(self) -> None:
        """End the subscriber if the thread of its deliveries or its filter has ended before it was closed.

        The thread may have been ended in ways that its own code does not see, such as an exception that
        another thread has set in it.
        """
        if self._filter is not None and self._filter.ended and not self.done:
            self.give_up("error")
        thread = self._thread
        if thread is None or thread.ident is None or thread.is_alive() or self.closed.is_set():
            return
        last = threading.Thread(target=self.break_off, args=(None,), name=thread.name, daemon=True)
        self._thread = last  # not the keeper, because `on_close` may hang
        last.start()

    def end_asking(self) -> None:
        """Report a call of the `when=` filter that has not returned by the end of a close."""
        what = f"was still in its when= when the bus closed, after more than {HANGS_SECONDS:g} s"
        self._end_asking(perf_counter() - HANGS_SECONDS, what)

    def _end_asking(self, since: float, what: str) -> bool:
        """Count a call of `when=` that began before `since` as failed; return whether there was one."""
        with self._lock:
            asking = self._asking
            if asking is None or asking[0] > since:
                return False
            self._asking = None
            self.failed += 1
        self._stalled_in(what, asking[1], perf_counter() - asking[0])
        return True

    def check_stall(self, now: float) -> None:
        """Give up a subscriber whose delivery or callback has lasted longer than its `stall_timeout`."""
        began, limit = self._began, self.options.stall_timeout
        if not began or now - began <= limit or (self.ended_by and not self._calling):
            return
        with self._lock:
            calling = self._calling
            if self._began != began or not (self._in_flight or calling):
                return  # it ended, or another thread saw the same stall
            item = self._item()
            done, self._progress = self._progress[0], [0]
            waiting = self._in_flight - done  # of a run of single events, the first is under way
            self.delivered += done
            self.failed += waiting if self.options.most else min(1, waiting)
            self.dropped += 0 if self.options.most else max(0, waiting - 1)
            self._in_flight, self._calling = 0, ""
        what = f"in {calling}" if calling else "on one delivery"
        self._stalled_in(f"spent more than stall_timeout={limit:g} s {what}", item, now - began)
        self.give_up("stalled")
        if calling:
            self.ended_by = "stalled"  # even if it had failed or was cancelled before

    def _stalled_in(self, what: str, item: Delivery | None, took: float) -> None:
        text = f"subscriber {self.name} {what}; it is no longer waited for{self._effect}"
        self.last_error = text
        logger.error("%s", text)
        self._report(self, TimeoutError(text), item, took)

    @property
    def _effect(self) -> str:
        """Return a sentence on what a stall does to other subscribers; "" if nothing."""
        return ""

    def break_off(self, error: BaseException | None) -> None:
        """End the subscriber because the delivery code itself failed, for example on an unprintable error.

        Args:
            error: what ended the code; None if it is unknown, because the thread had ended.
        """
        with self._lock:
            done, self._progress = self._progress[0], [0]
            self.delivered += done
            self.failed += self._in_flight - done
            self._in_flight, self._began = 0, 0.0
        how = (
            "its thread has ended" if error is None else f"its deliveries ended with a {type(error).__name__}"
        )
        self.last_error = error_text(RuntimeError(how))
        try:  # a handler of the log may raise, too, even SystemExit
            logger.error(
                "background subscriber %s cannot go on; please report this: %s",
                self.name,
                how,
                exc_info=error,
            )
            self._report(self, RuntimeError(how), None, 0.0)
        finally:
            self.give_up("error")
            self._finish()

    @abstractmethod
    def start(self) -> None:
        """Start the delivering thread or task."""

    # --- the subscriber's own thread or task ---------------------------------------------------------------

    def _next_delivery(self) -> Delivery | list[Timed] | None:
        """Take the next delivery out of the queue, and note its begin; None if the queue is empty."""
        events = self._take(self.options.most or 1)
        if not events:
            return None
        self._began = perf_counter()
        if self.options.timed:
            return timed(events)
        return events if self.options.most else events[0]

    def _delivered(self, error: BaseException | None) -> float:
        """Count the delivery that just ended, and return its seconds."""
        with self._lock:
            began, took = self._began, perf_counter() - self._began
            item = self._item()
            count, self._in_flight, self._began = self._in_flight, 0, 0.0
            self.calls += 1
            self.seconds += took
            if error is None:
                self.delivered += count
            else:
                self._charge(error, count)
        self.busy.add(took)
        self.untaken = self._still_untaken()
        if self.recorder is not None:
            self._record(self.recorder, item, began, took)
        if error is not None and count:  # 0: counted and reported when it stalled
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
        """Record the current delivery, which has not ended."""
        with self._lock:
            began, item = self._began, self._item()
        if began and item is not None:
            recorder.delivered(self.name, self.runs_on, item, began, now - began, "(under way)")

    def _finish(self) -> None:
        if self.ended_by != "stalled":
            self._call_back(self.options.on_close, "on_close")
        with self._lock:
            if self.untaken and self.ended_by != "closed":  # else they count as left
                self.losses_logged = not (self.failed or self.dropped)  # by the error of `on_close`
                self.failed += self.untaken
                self.delivered -= self.untaken
                self.untaken = 0
        self.closed.set()
        self._notify()
