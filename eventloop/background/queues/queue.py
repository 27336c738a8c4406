"""Hold the events of one background subscriber, and count each of them.

`emit` appends an event to `incoming` and returns. The subscriber's own thread or task moves events from there
into `buffer`, whose capacity the user chose. While a delivery keeps it busy, the keeper
(`eventloop.background.background`) moves them.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from itertools import islice
from time import perf_counter
from typing import Any

from eventloop.background.queues.account import Route, SubscriberAccount, type_of
from eventloop.background.queues.filter_thread import HANGS_SECONDS, FilterThread
from eventloop.background.queues.options import LaneOptions
from eventloop.costs.timing import Timing
from eventloop.costs.waits import waiting
from eventloop.events import Event
from eventloop.events.deferred import Pending, Queued, Stamped, unstamped
from eventloop.events.filters import Passes
from eventloop.util.waiting import Bell

INCOMING_LIMIT = 1_048_576
"""The length of `incoming` above which `keep_bounded` drops the oldest events and counts them.

It is reached if events are emitted too fast for seconds, or if `when=` hangs.
"""
HELD_SECONDS = 0.1
"""A delivery longer than this, in seconds, is slow: events beyond the capacity are then spilled."""
MOVED_AT_ONCE = 8192
"""The number of events that a thread puts into the queue before other threads may use the queue.

They take some 15 ms. With 256 the two threads wait for each other most of the time, and half of a burst stays
in memory (`tests/background/test_overflow_load.py`).
"""
FILTER_SECONDS = 0.2
"""The longest wait in seconds for `when=` to check the last events, when an account is read."""
_LOOK_SECONDS = 0.05
"""The interval in seconds at which a thread that waits for room wakes the subscriber."""

Delivery = Event | list[Event]


class SubscriberQueue(SubscriberAccount):
    """The bounded queue of a subscriber, with its spill file.

    If the subscriber has `when=`, a separate thread calls that filter for each event. A rejected event is
    removed from the account.
    """

    def __init__(self, name: str, options: LaneOptions) -> None:
        super().__init__(name, options)
        self.buffer: deque[Queued] = deque()
        self.waits = Timing()  # of some events, from their emit until they are taken out
        self._capacity = options.capacity
        self._spills = options.overflow == "spill"
        self._caught_up = True  # whether `incoming` was empty since the keeper looked
        self._began = 0.0  # when the delivery, or the callback, under way began; 0.0 without one
        self._asking: tuple[float, Event] | None = None  # begin and event of the running call of `when=`
        self._filter: FilterThread | None = None  # with a `when=`; then only it moves events into the queue
        self._last_taken: list[Queued] = []
        self._taken = self._asked = 0  # events taken by the filter thread, and those it has checked
        self._feeding = threading.Lock()  # held by the thread that moves events into the queue
        self._room = Bell()
        self._linger = options.linger  # seconds from one delivery to the next, in which events gather
        self._took_at = 0.0  # when the last events were taken out
        self._emitted = perf_counter()  # the time of the last event with one; spilled events get it

    def _bring_up_to_date(self) -> None:
        if self._filter is not None:
            self.catch_up(FILTER_SECONDS)
        elif self.incoming and (not self._spills or self.held):
            self.take_in(own=False)

    @property
    def held(self) -> bool:
        """Return whether the current delivery has taken longer than `HELD_SECONDS`."""
        return bool(self._began) and perf_counter() - self._began > HELD_SECONDS

    def set_routes(self, routes: dict[type[Event], Route]) -> None:
        """Set the event types that the subscriber wants, with their filters."""
        self.routes = routes
        if self._filter is None and any(route.late is not None for route in routes.values()):
            self._filter = FilterThread(self.name, self._ask_all, lambda: self.done)

    # --- putting in (the emitting thread) ------------------------------------------------------------------

    def feeds(self, event_type: type[Event]) -> tuple[Callable[[Event], None], Callable[[Event], None]]:
        """Return two functions that append an event of a type to `incoming` if it passes `every` and `start`.

        The second one, and both if the subscriber is given times, also store the time of the emit.
        """
        append, early = self.incoming.append, self.routes[event_type].early

        def feed(event: Event) -> None:
            if early is None or early(event):
                append(event)

        def stamp(event: Event) -> None:
            if early is None or early(event):
                append(Stamped(event, perf_counter()))

        plain = append if early is None else feed
        return (stamp if self.options.timed else plain), stamp

    def feed(self, event: Event) -> None:
        """Append an event of the background, such as a health event, to `incoming` if it is wanted."""
        if self._wants(event):
            self.incoming.append(self._entry(event))

    def _entry(self, event: Event) -> Queued:
        """Return an event that is created now, with the present time if the subscriber is given times."""
        return Stamped(event, perf_counter()) if self.options.timed else event

    def post(self, types: tuple[type[Event], ...]) -> Pending:
        """Append a placeholder for events that are created later to `incoming`, and return it."""
        self._has_posts = True
        pending = Pending(types)
        self.incoming.append(pending)
        return pending

    def fill(self, pending: Pending, events: list[Event]) -> None:
        """Put the events that the subscriber wants into a placeholder, unless it is filled already."""
        wanted = [self._entry(event) for event in events if self._wants(event)]
        with self._lock:
            if pending.events is None:
                pending.events = wanted

    def wants_now(self, passes: Passes, event: Event) -> bool:
        """Return whether an event passes the filters at the emit, for a subscriber with overflow="block".

        If `when=` raises, the error is reported, and the event counts as failed and is not wanted. A
        KeyboardInterrupt or SystemExit on the main thread is raised again, because a signal handler may have
        raised it.
        """
        try:
            return bool(passes(event))
        except BaseException as error:
            in_main = threading.current_thread() is threading.main_thread()
            if isinstance(error, KeyboardInterrupt | SystemExit) and in_main:
                raise
            with self._lock:
                self.received += 1
                self.failed += 1
            self._failure(error, event, 0.0)
            return False

    def would_want(self, event: Event) -> bool:
        """Return whether an event emitted after a close passes the filters; a running `when=` is skipped."""
        route = self.routes[type(event)]
        tests = [route.early] if self._asking is not None else [route.early, route.late]
        try:
            return all(test is None or test(event) for test in tests)
        except Exception:
            return True

    def wait_for_room(self) -> None:
        """Wait while the queue is full and has not ended, for overflow="block"."""
        if self._has_room():
            return
        with waiting("background", self.name):
            self.wake()
            while not self._room.wait_for(self._has_room, _LOOK_SECONDS):
                self.wake()

    def _has_room(self) -> bool:
        return self.done or self.queued < self._capacity

    def keep_bounded(self) -> None:
        """Drop the oldest events beyond `INCOMING_LIMIT`; emitting threads call it from time to time."""
        if len(self.incoming) <= INCOMING_LIMIT:
            return
        with self._lock:
            while len(self.incoming) > INCOMING_LIMIT:
                self._pop_incoming(dropped=True)

    # --- moving into the queue (the subscriber's own thread or task, or the keeper) -------------------------

    def take_in(self, *, own: bool) -> None:
        """Move events from `incoming` into the queue, up to the first deferred event that is not created yet.

        Args:
            own: whether the caller is the thread that delivers next; it leaves events that would be spilled.
        """
        if self._filter is not None:
            self._filter.wake()
            return
        while self.incoming:
            with self._feeding:  # released now and then, as the subscriber's thread may wait for it
                for _ in range(MOVED_AT_ONCE):
                    with self._lock:
                        event = self._move(own=own)
                    if event is None:
                        return
                    self._store(event)

    def _move(self, *, own: bool) -> Event | None:
        """Move events into the queue; return the first one that must be spilled, or None without one."""
        if self.done:
            self._drop_late()
        while (item := self._next_incoming()) is not None:
            full = self._spills and self._full()
            if full and own:
                self.incoming.appendleft(item)
                return None
            self.received += 1
            if full:
                return unstamped(item)
            self._enter(item)
        return None

    def _store(self, item: Queued) -> None:
        """Put an event into the queue, or without its time into the spill file if the queue is full."""
        if not (self._spills and self._full()):
            with self._lock:
                self._enter(item)
        elif not self._spill.add(unstamped(item)):
            with self._lock:
                self._turn_away(type_of(item), 1)

    def _next_incoming(self) -> Queued | None:
        """Remove and return the next event of `incoming`; None if there is none, or none created yet."""
        while self.incoming:
            item = self.incoming.popleft()
            if not isinstance(item, Pending):
                return item
            if item.events is None:
                self.incoming.appendleft(item)
                return None
            self.incoming.extendleft(reversed(item.events))
        return None

    def _wants(self, event: Event) -> bool:
        route = self.routes.get(type(event))
        return route is not None and (route.early is None or self.wants_now(route.early, event))

    def _full(self) -> bool:
        return len(self.buffer) >= self._capacity or self._spill.count > 0

    def _enter(self, item: Queued) -> None:
        """Put an event into the queue, or apply the overflow policy other than "spill"."""
        overflow = self.options.overflow
        if self.done or (overflow == "drop_newest" and self._full()):
            self._turn_away(type_of(item), 1)
            return
        self.buffer.append(item)
        if len(self.buffer) > self._capacity and overflow in ("drop_oldest", "latest"):
            self.buffer.popleft()
            self.dropped += 1

    def catch_up(self, timeout: float, *, patient: bool = False) -> bool:
        """Wait until `when=` was called for each event emitted so far; return False on a timeout.

        Args:
            timeout: seconds to wait at most.
            patient: whether to wait even for a call that hangs.
        """
        thread = self._filter
        if thread is None or thread.is_here():
            return True
        with self._lock:
            target = self._taken + self._waiting_outside()
        asking = self._asking
        if self._asked >= target or self.done:
            return True
        if not patient and asking is not None and perf_counter() - asking[0] > HANGS_SECONDS:
            return False
        thread.wake()
        return thread.asked.wait_for(lambda: self._asked >= target or self.done, timeout)

    def _ask_all(self) -> None:
        """Call `when=` for the events in `incoming`, and move those that pass into the queue."""
        with self._feeding:
            while True:
                with self._lock:
                    if self.done or (item := self._next_incoming()) is None:
                        return
                    self.received += 1
                    self._taken += 1
                    asking = self._asking = perf_counter(), unstamped(item)
                if self._passes(asking):
                    self._store(item)
                    self.wake()
                self._asked += 1

    def _passes(self, asking: tuple[float, Event]) -> bool:
        """Return whether an event passes `when=`, and count an event that does not.

        A rejected event is removed from the account; if `when=` raises, the event has failed. Nothing is
        counted if the call was given up as too long, or if the subscriber has ended during it: then the event
        was counted at that time.
        """
        event = asking[1]
        route = self.routes.get(type(event))
        failure: BaseException | None = None
        try:
            passes = route is None or route.late is None or bool(route.late(event))
        except BaseException as error:
            passes, failure = False, error
        with self._lock:
            given_up, self._asking = self._asking is not asking, None
            if given_up or self.ended_by:
                return False
            self.failed += failure is not None
            self.received -= not passes and failure is None
        if failure is not None:
            self._failure(failure, event, 0.0)
        return passes

    # --- taking out (the subscriber's own thread or task) --------------------------------------------------

    def _take(self, most: int = 1) -> list[Any]:
        """Remove and return at most `most` events; an empty list if there are none.

        They are `Stamped` if the subscriber is given times.
        """
        most = min(most, self._capacity)
        with self._lock:
            if self._has_caught_up():
                return self._note(self._take_directly(most))
        self._refill()
        with self._lock:
            return self._note(self._take_queued(most))

    def _has_caught_up(self) -> bool:
        """Return whether the subscriber may take its next event directly from `incoming`.

        It may if no older event is in the queue, in the spill file, or being moved by another thread. The
        caller holds the lock.
        """
        others_move = self._filter is not None or self._feeding.locked()
        return self._spills and not (others_move or self.buffer or self._spill.count or self.ended_by)

    def _note(self, events: list[Queued]) -> list[Queued]:
        """Count events as being delivered, and return them."""
        self._in_flight += len(events)
        self._last_taken = events
        if self._linger and events:
            self._took_at = perf_counter()
        return events

    def _take_queued(self, most: int) -> list[Queued]:
        count = 0 if self.ended_by else min(most, len(self.buffer))
        return self._measured([self.buffer.popleft() for _ in range(count)])

    def _take_directly(self, most: int) -> list[Queued]:
        """Take at most `most` events from `incoming`, without putting them into the queue first.

        Only called if `_has_caught_up` is true: the queue is empty then, so that the order is kept.
        """
        found: list[Any]  # without deferred events
        if self._has_posts:
            found = list(islice(iter(self._next_incoming, None), most))
        else:
            popleft = self.incoming.popleft  # one by one, as other threads append meanwhile
            found = [popleft() for _ in range(min(most, len(self.incoming)))]
        self.received += len(found)
        self._caught_up = self._caught_up or not self.incoming
        return self._measured(found)

    def _measured(self, items: list[Queued]) -> list[Queued]:
        """Record the waits of events that have a time; return the events, with times if `timed`."""
        gives = self.options.timed
        if not gives and Stamped not in map(type, items):
            return items
        for at, item in enumerate(items):
            if isinstance(item, Stamped):
                self._emitted = item.emitted
                self.waits.add(perf_counter() - item.emitted)
                items[at] = item if gives else item.event
            elif gives:
                items[at] = Stamped(item, self._emitted)
        return items

    def _refill(self) -> None:
        """Fill the queue from the spill file, or from `incoming` if the file is empty."""
        if self._spill.count and not self.buffer:
            with self._feeding:  # so that a close finds the events either in the file or in the queue
                if self.ended_by:
                    return
                events, lost = self._spill.read(self._capacity)
                with self._lock:
                    self.dropped += lost
                    if not self.ended_by:
                        self.buffer.extend(events)
        elif self.incoming:
            self.take_in(own=True)

    @abstractmethod
    def wake(self) -> None:
        """Make the delivering thread or task look at the queue; safe from any thread."""

    @abstractmethod
    def _failure(self, error: BaseException, item: Delivery | None, took: float) -> None:
        """Report an error that an event caused."""
