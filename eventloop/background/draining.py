"""Flush and close the background side: wait, on any thread except its own, for what was emitted.

`eventloop.background.loop` builds on it. A wait ends at its deadline, whatever a subscriber does.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from time import monotonic, perf_counter

from eventloop.background.health import Health
from eventloop.background.overtime import Overtime, advice
from eventloop.background.queues.subscriber import Lane
from eventloop.background.queues.wakeup import Doorbell
from eventloop.background.router import Item, Router
from eventloop.background.runners import TaskLane
from eventloop.background.shutdown_order import Ending
from eventloop.events import Event, EventsDropped, HandlerFailed
from eventloop.util.waiting import Latch

logger = logging.getLogger("eventloop")

POLL_SECONDS = 0.2
"""How often the loop looks at its inbox without being woken.

Also the longest slice of a wait for the loop.
"""
HELD_SECONDS = 3 * POLL_SECONDS
"""A loop that has not looked at its inbox for so long may be blocked by a coroutine that never awaits."""
REST_SECONDS = 1.0
"""The longest time that a close spends on the filters of events that it routes itself."""
REST_AT_LEAST_SECONDS = 0.1
"""Time for these filters if the deadline has passed."""


class Draining(ABC):
    """The inbox and the subscribers' queues, with flush and close; `Background` feeds them."""

    def __init__(self) -> None:
        self.inbox: deque[Item] = deque()
        self.lanes: list[Lane] = []
        self.health = Health(self._tell)
        self.closed = False  # it takes no more subscribers
        self.finished = False  # it delivers no more: `close` has come to its end
        self.tells_losses = True
        """Whether a close logs what was lost; False while its caller logs it."""
        self._router = Router(self.health.latest)
        self._doorbell = Doorbell(self.inbox, self._ring)
        self._thread: threading.Thread | None = None  # the loop's
        self._starting = threading.RLock()  # held by who starts it, or finds that it never was
        self._coroutines: set[TaskLane] = set()  # coroutine subscribers' lanes that have not ended
        self._looked_at = 0.0  # when the loop last did, by `monotonic`
        self._emission: object = object()  # another one with all that is emitted here, as far as that is seen
        self._tidings: deque[tuple[Event, Lane | None]] = deque()  # health events, and whom they are not for
        self._awaited: set[Latch] = set()  # set once what was emitted before is routed
        self._closer = threading.RLock()  # of the thread that is closing; released by nobody else
        self._close: Ending | None = None  # what that has got to
        self._complete = True  # what a close returned
        self._stopping = False

    @abstractmethod
    def wake(self) -> None:
        """Make the loop look at its inbox now; safe from any thread."""

    @abstractmethod
    def _ring(self) -> None:
        """Make the loop look at its inbox soon; called on a subscriber's thread."""

    @abstractmethod
    def _call_soon(self, fn: Callable[[], object]) -> None:
        """Have the loop call `fn` on its thread."""

    def on_background_thread(self) -> bool:
        """Return whether this is the loop's thread or a subscriber's; such a thread must not wait here."""
        current = threading.current_thread()
        return current is self._thread or current.name.startswith("eventloop ")

    def route_now(self, timeout: float) -> bool:
        """Wait until everything handed over so far is in the subscribers' queues; return False if it is not.

        A thread of the background does not wait, and gets False if anything is left.
        """
        if self._thread is None or self._stopping or self.on_background_thread():
            return not self._router.left(self.inbox)
        reached = Latch()
        self.inbox.append(reached.set)
        self._awaited.add(reached)
        try:
            self.wake()
            return self._wait(reached.wait, monotonic() + timeout)
        finally:
            self._awaited.discard(reached)

    def flush(self, timeout: float, noting: AbstractContextManager[None]) -> bool:
        """Wait until everything emitted so far is delivered and flushed; return False on a timeout.

        Waits also for what subscribers emit meanwhile: while `noting` is entered, events come by
        `hand_over_noted`.
        """
        return self._flush_until(monotonic() + timeout, timeout, noting)

    def _flush_until(self, deadline: float, timeout: float, noting: AbstractContextManager[None]) -> bool:
        flushed: dict[Lane, int] = {}  # and how much they had been given by then
        before = self._emission, self._doorbell.noticed
        complete = self._flush_lanes(flushed, deadline, timeout)
        seen = before != (self._emission, self._doorbell.noticed)
        if complete and (seen or self._fed_since(flushed, deadline)):
            with noting:
                # once more, but not for ever: two whose `on_flush` fails would hear of each other
                if self._quieten(deadline, timeout) and self._flush_lanes(flushed, deadline, timeout):
                    self._quieten(deadline, timeout)
        return complete

    def flush_while_delivering(
        self, timeout: float, noting: Callable[[], AbstractContextManager[None]], allowed: Callable[[], bool]
    ) -> bool:
        """Repeat `flush` as long as fewer events are left each time, and return whether all were delivered.

        Args:
            noting: makes the context in which events come by `hand_over_noted`.
            allowed: whether there is time to go on.
        """
        deadline = monotonic() + timeout
        self.route_now(timeout)
        overtime = Overtime(self.lanes, timeout, allowed)
        complete = self._flush_until(deadline, timeout, noting())
        while not complete and (more := overtime.extension()):
            complete = self.flush(more, noting())
        if not complete and (text := advice(self.lanes)):
            logger.warning("not everything was delivered in time: %s. %s", _names(self.lanes), text)
        return complete

    @property
    def _may_be_held(self) -> bool:
        """True if a coroutine that was given up may block the loop; then flushes do not wait for the loop."""
        return any(lane.ended_by == "stalled" for lane in self._coroutines.copy())

    def _fed_since(self, flushed: dict[Lane, int], deadline: float) -> bool:
        """Return whether queues were fed since they were `flushed`, also by other threads.

        The loop may have taken events from its inbox that a subscriber emitted, without `wakeup` noticing.
        """
        routed = not self._may_be_held and self.route_now(deadline - monotonic())
        return routed and any(not lane.done and lane.routed != flushed.get(lane, 0) for lane in self.lanes)

    def _quieten(self, deadline: float, timeout: float) -> bool:
        """Wait until subscribers emit nothing more.

        Returns False after the deadline, or if the loop may be blocked.
        """
        emission = None
        while emission is not self._emission:
            emission = self._emission
            if self._may_be_held or not self._flush_lanes(None, deadline, timeout):
                return False
        return True

    def _flush_lanes(self, flushed: dict[Lane, int] | None, deadline: float, timeout: float) -> bool:
        """Flush the queues that were fed since they were `flushed`; with None only wait for all of them."""
        complete = self.route_now(deadline - monotonic())
        if self.health.tell_drops(self.lanes):
            complete = self.route_now(deadline - monotonic()) and complete
        waiting: list[tuple[Lane, int]] = []
        for lane in self.lanes:
            routed = lane.routed
            if lane.done or (flushed is not None and flushed.get(lane) == routed):
                continue
            if flushed is not None:
                flushed[lane] = routed
            if lane.blocked_by_caller:
                complete = complete and not lane.queued
                continue
            waiting.append((lane, lane.flush_soon(calls=flushed is not None)))
        for lane, number in waiting:
            if not self._wait(partial(lane.wait_flushed, number=number), deadline):
                lane.waited_in_vain(timeout)
                complete = False
        if complete:
            self.health.tell_drops(self.lanes)  # for the next time, if there was anything
        return complete

    def close(
        self, timeout: float, allowed: Callable[[], bool] = lambda: False, *, advises: bool = False
    ) -> bool:
        """Deliver what was handed over, close every queue and stop the thread; return False on a timeout.

        If a signal interrupted a call, the next call continues it. A call during another thread's call waits
        for that one.

        Args:
            allowed: whether the deadline may move while fewer and fewer events are left.
            advises: whether to log what would have got the rest delivered.
        """
        deadline = monotonic() + timeout
        self.closed = True
        try:
            if not self._wait(lambda seconds: self._closer.acquire(timeout=seconds), deadline):
                return False
            if not self.finished:
                self._drain(deadline, timeout, allowed, advises=advises)
            return self._complete
        finally:
            with suppress(RuntimeError):  # a signal, or the deadline, came before it was this thread's
                self._closer.release()

    def _drain(self, deadline: float, timeout: float, allowed: Callable[[], bool], *, advises: bool) -> None:
        """Close the queues; a signal may interrupt this anywhere, and repeating a step does no harm."""
        with self._starting:
            if self._thread is None:
                self.finished = True
                return
        ending = self._close
        if ending is None or not self._stopping:
            self._complete = False  # until it is known
            ending = self._begin_to_end(deadline, timeout)
            self._complete = self._deliver_rest(ending, allowed)
            for lane in self.lanes:
                lane.abandon()
            self._stopping = True
        self.wake()
        self._thread.join(max(0.1, min(ending.deadline, ending.held_until) - monotonic()))
        self._route_rest(self._lose_rest, ending.deadline)  # what was emitted meanwhile is dropped
        if not self._complete:
            took = monotonic() - (deadline - timeout)
            as_asked = took >= timeout and ending.deadline == deadline
            _tell_end(ending, timeout if as_asked else round(took, 1), advises=advises)
        self._tell_losses()
        self._let_go()
        self.finished = True

    def _begin_to_end(self, deadline: float, timeout: float) -> Ending:
        listening = {*self._router.lanes_of((HandlerFailed, EventsDropped))}
        ending = Ending(
            list(self.lanes), listening, deadline, timeout,
            left=lambda: bool(self._tidings) or self._router.left(self.inbox),
            tell_drops=lambda: self.health.tell_drops(self.lanes),
        )  # fmt: skip
        if monotonic() - self._looked_at > HELD_SECONDS:
            waits = [ending.until(lane) for lane in self._coroutines.copy() if lane.waited]
            ending.held_until = max(waits, default=deadline)
        return ending

    def _deliver_rest(self, ending: Ending, allowed: Callable[[], bool]) -> bool:
        for lane in ending.lanes:
            lane.hurry()
        routed = self.route_now(min(ending.deadline, ending.held_until) - monotonic())
        ending.overtime = Overtime(ending.lanes, ending.timeout, allowed)
        self._close = ending
        self.wake()
        complete = routed
        for lane in ending.lanes:
            complete = self._wait_closed(lane, ending, held=not routed) and complete  # by a coroutine
        complete = complete and self.route_now(ending.deadline - monotonic()) and not ending.cut_short
        return complete and not any(lane.queued for lane in ending.lanes)

    def _wait_closed(self, lane: Lane, ending: Ending, *, held: bool) -> bool:
        """Wait until a queue is closed, up to its own deadline.

        The loop tells queues when to end; if a coroutine blocks the loop, this thread does it, and routes
        what is left.
        """
        if lane in ending.blocked_by_caller:
            return not lane.queued
        while True:
            if held and monotonic() < ending.deadline and not any(each.being_fed for each in ending.lanes):
                self._route_rest(partial(self._give_rest, until=ending.deadline), ending.deadline)
                self._wake_lanes()
            while ending.look(certain=held, closing=True):
                pass
            left = min(ending.next_look(), until := ending.until(lane)) - monotonic()
            if lane.wait_closed(max(0.0, min(POLL_SECONDS, left))):
                return True
            self._check_stalls()
            self.wake()
            if monotonic() >= until:
                lane.waited_in_vain(ending.timeout)
                return False

    def _tell_losses(self) -> None:
        losses = [text for lane in self.lanes if (text := lane.new_losses())]
        if losses and self.tells_losses:
            logger.warning(
                "the bus is closed, and not everything was delivered: %s. bus.stats() has the details",
                "; ".join(losses),
            )

    def forget_losses(self) -> None:
        """Do not log the losses so far again: the caller has logged them."""
        for lane in list(self.lanes):
            lane.new_losses()

    def _wait(self, wait: Callable[[float], bool], deadline: float) -> bool:
        """Wait in slices of `POLL_SECONDS`, and look for stalled subscribers between them.

        A blocked loop cannot find the coroutine that blocks it.
        """
        while not wait(max(0.0, min(POLL_SECONDS, deadline - monotonic()))):
            self._check_stalls()
            if monotonic() >= deadline:
                return False
        return True

    def _route_rest(self, route: Callable[[deque[Item]], None], deadline: float) -> None:
        """Route or drop what is left, on a thread that has a deadline.

        A filter is foreign code that may never return: after one that does not, no filter is called.
        """
        router = self._router
        left = bool(self._tidings) or router.left(self.inbox)
        if left and router.asks and (router.filters or router.coming):
            router.asks = self._ask_about_rest(route, deadline)
        route(self.inbox)
        for lane in self.lanes:
            lane.end_asking()

    def _give_rest(self, inbox: deque[Item], until: float) -> None:
        """Route what a blocked loop has not routed."""
        self._route_tidings()
        self._router.route_rest(inbox, until)

    def _lose_rest(self, inbox: deque[Item]) -> None:
        """Count everything that is left as dropped, without feeding a queue: its disk may block."""
        while self._tidings:
            with suppress(IndexError):
                self._router.lose(*self._tidings.popleft())
        self._router.lose_rest(inbox)

    def _ask_about_rest(self, route: Callable[[deque[Item]], None], deadline: float) -> bool:
        thread = threading.Thread(target=route, args=(self.inbox,), name="eventloop rest", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # an interpreter that ends starts none
            return False

        def ended(seconds: float) -> bool:
            thread.join(seconds)
            return not thread.is_alive() or self._router.stuck

        self._wait(ended, min(monotonic() + REST_SECONDS, max(monotonic() + REST_AT_LEAST_SECONDS, deadline)))
        return not thread.is_alive()

    def _tell(self, event: Event, but: Lane | None) -> None:
        """Have a health event routed; safe from any thread."""
        self._tidings.append((event, but))
        if self._router.routes.get(type(event)):
            self._emission = object()
        self._call_soon(self._route_tidings)

    def _route_tidings(self) -> None:
        while self._tidings:
            with suppress(IndexError):  # one that closes may take them too
                event, but = self._tidings.popleft()
                self._router.route(event, but)

    def _wake_lanes(self) -> None:
        for lane in self.lanes:
            if lane.buffer:
                lane.wake()

    def _check_stalls(self) -> None:
        now = perf_counter()
        for lane in self.lanes:
            lane.check(now)

    def _let_go(self) -> None:
        self._router.close()
        self.lanes, self._close = [], None  # a subscriber may well hold the bus, which this outlives


def _tell_end(ending: Ending, seconds: float, *, advises: bool) -> None:
    names, text = _names(ending.lanes), advice(ending.lanes) if advises else ""
    if ending.cut_short and not names:
        logger.warning(
            "closed after %g s; events that had not reached their subscribers by then were dropped: "
            "subscribers or other threads went on emitting, or the background loop was blocked", seconds,
        )  # fmt: skip
        return
    more = f". {text}" if text else ""
    logger.warning("closed after %g s; events left undelivered: %s%s", seconds, names or "none", more)


def _names(lanes: list[Lane]) -> str:
    """List the subscribers with events left, how many, and where they are stuck."""
    return ", ".join(
        f"{lane.name} ({lane.queued})" + (f", {lane.stuck}" if lane.stuck else "")
        for lane in lanes
        if lane.queued
    )
