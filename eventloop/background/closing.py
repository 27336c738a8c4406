"""Flush and close the background subscribers: wait until the events emitted so far are delivered.

`eventloop.background.background` derives from it. Every wait ends at its deadline, even if a subscriber
hangs.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from time import monotonic

from eventloop.background.coroutine_loop import CoroutineLoop
from eventloop.background.health import Health
from eventloop.background.overtime import Deadline, advice
from eventloop.background.queues.awaited import add_vain_wait, stuck, waited
from eventloop.background.queues.leftover import KeepLeft, abandon, keep_left_events
from eventloop.background.queues.subscriber import Subscriber
from eventloop.background.queues.supervision import end_filter_call
from eventloop.background.threads import on_background_thread
from eventloop.costs.waits import waiting
from eventloop.events import Event, EventsDropped, HandlerFailed
from eventloop.events.deferred import Deferred, Pending
from eventloop.util.waiting import Latch

logger = logging.getLogger("eventloop")

METRICS = "values from the device"
"""The name of waits for metrics in the costs."""
SLICE_SECONDS = 0.2
"""The longest single wait in seconds; after each one, the subscriber is checked for a hang."""
GRACE_SECONDS = 0.5
"""The seconds that a close waits for a delivery for which a flush has already waited in vain."""
SPARE_SECONDS = 0.5
"""The seconds before its deadline at which a close begins to end idle subscribers.

As many seconds are reserved for subscribers to health events. Each of the two reserves is at most a quarter
of the timeout.
"""

JOIN_SECONDS = 0.5
"""The longest wait in seconds for all threads that were asked to end and may still look at the queues."""


class Posted:
    """A `Deferred` object, and the places that the queues of its subscribers keep for its events."""

    def __init__(self, deferred: Deferred, places: list[tuple[Subscriber, Pending]]) -> None:
        self.deferred = deferred
        self.places = places
        self.made = Latch()


class Closing(ABC):
    """Flush and close the queues of all background subscribers of a bus; `Background` derives from it."""

    def __init__(self) -> None:
        self.subscribers: list[Subscriber] = []
        self.health = Health(self._hand_over)
        self.closed = False  # it takes no more subscribers
        self.finished = False  # it delivers no more: `close` has come to its end
        self.emissions = 0
        """The number of events emitted by subscribers and health reports, counted during a flush."""
        self.tells_losses = True
        """Whether a close logs lost events; False while its caller logs them."""
        self.flush_ends: Callable[[], bool] = lambda: False
        """Returns True to end a flush early, which then logs nothing, because a close follows."""
        self.keep_left: KeepLeft | None = None
        self.replay_command = ""
        """The command that delivers the events that `keep_left` keeps; "" without one."""
        self._logged: dict[Subscriber, int] = {}
        """The subscribers that the last flush has logged, each with the number of its events by then."""
        self._listening: dict[type[Event], list[Subscriber]] = {}
        self._posted: deque[Posted] = deque()
        self._thread: threading.Thread | None = None  # the keeper's
        self._coroutines: CoroutineLoop | None = None
        self._starting = threading.RLock()
        self._closer = threading.RLock()  # held by the thread that is closing
        self._complete = True  # what a close returned
        self._reports = True  # whether health events are queued: until their subscribers are ended
        self._stopping = False

    @abstractmethod
    def wake(self) -> None:
        """Make the keeper thread look at the queues now; safe from any thread."""

    def _hand_over(self, event: Event, but: Subscriber | None) -> None:
        """Queue a health event for its subscribers, except for the subscriber `but`; safe from any thread."""
        for subscriber in self._listening.get(type(event), ()) if self._reports else ():
            if subscriber is not but:
                self.emissions += 1
                subscriber.enqueue(event)

    # --- flush ---------------------------------------------------------------------------------------------

    def flush(self, timeout: float, noting: AbstractContextManager[None]) -> bool:
        """Wait until everything emitted so far is delivered and flushed; return False on a timeout.

        The wait includes events that subscribers emit meanwhile, but not those of other threads.

        Args:
            timeout: seconds to wait at most.
            noting: a context in which `emissions` counts the events that subscribers emit.
        """
        return self._flush(Deadline(timeout), noting)

    def _flush(self, deadline: Deadline, noting: AbstractContextManager[None]) -> bool:
        flushed = {subscriber: subscriber.emitted for subscriber in self.subscribers}
        complete = self._flush_lanes(deadline, calls=True)
        told = self.health.tell_drops(self.subscribers)
        if complete and (told or self._fed_since(flushed)):
            with noting:  # only now, because it changes the routes
                # repeated once only: two subscribers whose `on_flush` fails would get each other's reports
                if self._settle(deadline, lambda: self.emissions):
                    self._flush_lanes(deadline, calls=True, subscribers=self._fed_since(flushed))
                    self._settle(deadline, lambda: self.emissions)
        return complete

    def _fed_since(self, flushed: dict[Subscriber, int]) -> list[Subscriber]:
        return [
            subscriber for subscriber in self.subscribers if subscriber.emitted != flushed.get(subscriber, 0)
        ]

    def flush_while_delivering(
        self, timeout: float, noting: Callable[[], AbstractContextManager[None]], allowed: Callable[[], bool]
    ) -> bool:
        """Repeat `flush` as long as subscribers make progress; return whether no event is left.

        Args:
            timeout: seconds of each flush.
            noting: creates the context for `flush`.
            allowed: returns whether there is time for another repetition.
        """
        deadline = Deadline(timeout, self.subscribers, allowed)
        complete = self._flush(deadline, noting())
        while not (complete or self.flush_ends()) and deadline.extend():
            complete = self._flush(deadline, noting())
        left = [] if complete or self.flush_ends() else _with_left(self.subscribers)
        self._logged = {subscriber: subscriber.emitted for subscriber in left}
        if left:
            command = self.replay_command
            kept = f"What is left when the program ends is kept for `{command}`" if command else ""
            text = ". ".join(filter(None, (_names(left), advice(left), kept)))
            logger.warning("not everything was delivered in time: %s", text)
        return complete

    def _settle(self, deadline: Deadline, emitted: Callable[[], int], reserve: float = 0.0) -> bool:
        """Wait until nothing more is emitted; return False at the deadline.

        Args:
            deadline: the end of the wait.
            emitted: returns the number of events emitted so far.
            reserve: the seconds before the deadline at which the wait ends.
        """
        while True:
            before = emitted()
            in_time = self._flush_lanes(deadline, calls=False, reserve=reserve)
            if not in_time or not deadline.left(reserve):
                return False
            if emitted() == before and not self._posted:
                return True

    def _emitted(self) -> int:
        return sum(subscriber.emitted for subscriber in self.subscribers)

    def _flush_lanes(
        self,
        deadline: Deadline,
        *,
        calls: bool,
        subscribers: Iterable[Subscriber] | None = None,
        reserve: float = 0.0,
    ) -> bool:
        """Wait until each queue has handled the events emitted for it so far; return False on a timeout.

        Args:
            deadline: the end of the wait.
            calls: whether to call `on_flush` at the end.
            subscribers: the queues to wait for; None means all.
            reserve: the seconds before the deadline at which the wait ends.
        """
        complete = self._wait_posted(deadline, reserve)
        asked = []
        for subscriber in tuple(self.subscribers if subscribers is None else subscribers):
            if subscriber.done:
                continue
            if subscriber.runner.blocked_by_caller:
                complete = complete and not subscriber.queued
            else:
                with waiting("background", subscriber.name):
                    complete = self._catch_up(subscriber, deadline, reserve) and complete
                asked.append((subscriber, subscriber.request_flush(calls=calls)))
        for subscriber, flush in asked:
            with waiting("background", subscriber.name):
                while not flush.made.wait(min(SLICE_SECONDS, deadline.left(reserve))):
                    if subscriber.done:
                        break
                    if self.flush_ends():
                        return False
                    if not deadline.left(reserve):
                        add_vain_wait(subscriber, deadline.seconds)
                        complete = False
                        break
        return complete

    def _catch_up(self, subscriber: Subscriber, deadline: Deadline, reserve: float) -> bool:
        """Wait for the `when=` filter of a subscriber; return False at the deadline."""
        while subscriber.filter is not None and not subscriber.filter.wait(
            min(SLICE_SECONDS, deadline.left(reserve)), patient=True
        ):
            if self.flush_ends() or not deadline.left(reserve):
                return False
        return True

    def _wait_posted(self, deadline: Deadline, reserve: float) -> bool:
        """Wait until all events of the `Deferred` objects posted so far are created; False on a timeout."""
        with suppress(IndexError), waiting("background", METRICS):
            last = self._posted[-1]
            self.wake()
            while not last.made.wait(min(SLICE_SECONDS, deadline.left(reserve))):
                if self.flush_ends() or not deadline.left(reserve):
                    return False
        return True

    # --- close ---------------------------------------------------------------------------------------------

    def close(
        self, timeout: float, allowed: Callable[[], bool] | None = None, *, advises: bool = False
    ) -> bool:
        """Deliver the queued events, close every queue and stop the threads; return False on a timeout.

        After an interruption by a signal, the next call continues. A call during another thread's call waits
        for that call.

        Args:
            timeout: seconds to wait at most.
            allowed: returns whether the deadline may move while subscribers make progress. When it becomes
                False during the close, the deadline comes nearer. None means a fixed deadline.
            advises: whether to log advice on settings that would have allowed all events to be delivered.
        """
        deadline = Deadline(timeout, list(self.subscribers), allowed)
        self.closed = True
        if not self._closer.acquire(timeout=max(0.0, timeout)):
            return False
        try:
            if not self.finished:
                with self._starting:  # waits for a start of the keeper that is in progress
                    self.finished = self._thread is None
            if not self.finished:
                self._close(deadline, advises=advises)
            return self._complete
        finally:
            self._closer.release()

    def _close(self, deadline: Deadline, *, advises: bool) -> None:
        """Close the queues. A signal may interrupt this anywhere, because all steps can be repeated."""
        self._complete = False  # until it is known
        self.flush_ends = lambda: False  # it is about flushes before this close
        began, timeout, subscribers = monotonic(), deadline.seconds, list(self.subscribers)
        for subscriber in subscribers:
            subscriber.hurry()
        spare = min(SPARE_SECONDS, timeout / 4)
        quiet = self._settle(deadline, self._emitted, 2 * spare + self._waited(subscribers, timeout))
        while not quiet and deadline.extend():
            quiet = self._settle(deadline, self._emitted, 2 * spare)
        dropped = sum(subscriber.account.dropped for subscriber in subscribers)
        last = {
            subscriber
            for kind in (HandlerFailed, EventsDropped)
            for subscriber in self._listening.get(kind, ())
        }
        ended = self._end(
            [subscriber for subscriber in subscribers if subscriber not in last], deadline, spare
        )
        for subscriber in subscribers:
            end_filter_call(subscriber)
        self.health.tell_drops(subscribers)
        self._flush_lanes(deadline, calls=False, subscribers=last, reserve=spare / 2)
        self._reports = False  # else the last to end would count those about each other's ends as dropped
        ended = (
            self._end([subscriber for subscriber in subscribers if subscriber in last], deadline, 0.0)
            and ended
        )
        for subscriber in subscribers:
            abandon(subscriber)
        left = any(
            subscriber.queued for subscriber in subscribers
        )  # also counts the events that came too late
        # `_end` has delivered what was emitted since then, unless some came too late for it
        quiet = quiet or (
            sum(subscriber.account.dropped for subscriber in subscribers) == dropped and not self._posted
        )
        self._complete = quiet and ended and not left
        took = monotonic() - began
        answers = {keep_left_events(subscriber, self.keep_left) for subscriber in subscribers}
        if not self._complete:
            seconds = round(timeout if abs(took - timeout) < 1 else took, 2)
            self._tell_end(subscribers, seconds, quiet, advises, self._remedy(answers))
        self._tell_losses()
        self._stop()
        self._join()
        self._let_go()
        self.finished = True

    def _waited(self, subscribers: Iterable[Subscriber], timeout: float) -> float:
        """Return the seconds less to wait because a flush has waited in vain for the current delivery.

        At least `GRACE_SECONDS` are left, so the result is negative for a shorter timeout.
        """
        longest = max(map(waited, subscribers), default=0.0)
        return timeout - max(GRACE_SECONDS, timeout - longest) if longest else 0.0

    def _end(self, subscribers: list[Subscriber], deadline: Deadline, reserve: float) -> bool:
        """End each queue once it is empty; return False if a queue has not ended by its deadline."""
        for subscriber in subscribers:
            subscriber.request_close()
        ended = True
        for subscriber in subscribers:
            if subscriber.runner.blocked_by_caller:
                ended = ended and not subscriber.queued
                continue
            with waiting("background", subscriber.name):
                ended = self._wait_closed(subscriber, deadline, reserve) and ended
        return ended

    def _wait_closed(self, subscriber: Subscriber, deadline: Deadline, reserve: float) -> bool:
        """Wait until a subscriber has ended; return False if it makes no progress at the deadline."""
        less = reserve + self._waited([subscriber], deadline.seconds)
        if deadline.moved:  # then what the delivery has taken so far is no reason to wait less
            less = min(less, reserve)
        while not subscriber.wait_closed(min(SLICE_SECONDS, deadline.left(less))):
            if deadline.left(less):
                continue
            add_vain_wait(subscriber, deadline.seconds)
            if not deadline.extend():
                return False
            less = min(less, reserve)
        return True

    def _stop(self) -> None:
        self._stopping = True
        self.wake()
        if self._coroutines is not None:
            self._coroutines.stop()

    def _join(self) -> None:
        """Wait until the threads that were asked to end have ended."""
        if on_background_thread():
            return
        ended = [subscriber.runner.thread for subscriber in self.subscribers if subscriber.closed.is_set()]
        until = monotonic() + JOIN_SECONDS
        with waiting("background", "the end of its threads"):
            for thread in (*ended, self._thread, getattr(self._coroutines, "thread", None)):
                if thread is not None and thread.is_alive():
                    thread.join(max(0.0, until - monotonic()))

    def _remedy(self, answers: set[bool | None]) -> str:
        """Return what the command does with the kept events; "" without any, or without a command."""
        texts = {True: "delivers", False: "says how to deliver"}
        done = " or ".join(text for answer, text in texts.items() if answer in answers)
        return f"`{self.replay_command}` {done} them" if done and self.replay_command else ""

    def _tell_end(
        self,
        subscribers: list[Subscriber],
        seconds: float,
        quiet: bool,
        advises: bool,
        remedy: str,
    ) -> None:
        """Log the undelivered events, except those that a flush at the end of a run has logged."""
        every = _with_left(subscribers)
        left = [subscriber for subscriber in every if subscriber.emitted != self._logged.get(subscriber, -1)]
        if every and not left:
            return
        if not (quiet or left):
            logger.warning(
                "closed after %g s; events that had not reached their subscribers by then were dropped: "
                "subscribers or other threads went on emitting", seconds,
            )  # fmt: skip
            return
        text = ". ".join(filter(None, (_names(left) or "none", advice(left) if advises else "", remedy)))
        logger.warning("closed after %g s; events left undelivered: %s", seconds, text)

    def _tell_losses(self) -> None:
        losses = [
            text
            for subscriber in self.subscribers
            if (text := subscriber.new_losses()) and not subscriber.account.losses_logged
        ]
        if losses and self.tells_losses:
            logger.warning(
                "the bus is closed, and not everything was delivered: %s. bus.stats() has the details",
                "; ".join(losses),
            )

    @contextmanager
    def ending_run(self, ends: Callable[[], bool]) -> Iterator[None]:
        """Let the caller report lost events instead of `close`, and end a flush once `ends()` is True."""
        self.tells_losses, self.flush_ends = False, ends
        try:
            yield
        finally:
            for subscriber in list(self.subscribers):  # the caller has logged its losses
                subscriber.new_losses()
                subscriber.account.losses_logged = False
            self.tells_losses, self.flush_ends = True, lambda: False

    def _let_go(self) -> None:
        self.subscribers, self._listening, self._logged = (
            [],
            {},
            {},
        )  # a subscriber may hold a reference to the bus


def _with_left(subscribers: Iterable[Subscriber]) -> list[Subscriber]:
    return [
        subscriber
        for subscriber in subscribers
        if subscriber.queued or stuck(subscriber) or subscriber.left_in
    ]


def _names(subscribers: list[Subscriber]) -> str:
    """List the subscribers, their numbers of undelivered events, and the calls in which they are stuck."""
    states = {subscriber: stuck(subscriber) or subscriber.left_in for subscriber in subscribers}
    return ", ".join(
        f"{subscriber.name} ({subscriber.queued}){text and f', {text}'}"
        for subscriber, text in states.items()
    )
