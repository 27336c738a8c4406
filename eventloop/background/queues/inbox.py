"""Queue the events of one background subscriber: incoming events, the bounded queue, and the spill file.

An emit appends an event to the list `incoming` and returns. The subscriber's own thread or task moves events
from there into the bounded queue, `buffer`. While that thread is busy with a delivery, the keeper moves them,
which is the thread of a bus that supervises all queues (`eventloop.background.background`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from time import perf_counter
from typing import Any

import msgspec

from eventloop.background.queues.account import Account
from eventloop.background.queues.options import SubscriberOptions
from eventloop.background.queues.spill import Spill
from eventloop.costs.timing import Timing
from eventloop.events import Event
from eventloop.events.deferred import Pending, Queued, Stamped, unstamped
from eventloop.events.filters import Passes

INCOMING_LIMIT = 1_048_576
"""The length of `incoming` above which `drop_excess` drops the oldest events and counts them.

The list becomes so long if events are emitted too fast for seconds, or if `when=` hangs.
"""
MOVED_AT_ONCE = 8192
"""The number of events that a thread moves into the queue before it releases the lock of the queue once.

This takes some 15 ms. With 256 events, the moving and the delivering thread would wait for each other most of
the time, and half of a burst would stay in memory (`tests/background/test_overflow_load.py`).
"""

Incoming = Queued | Pending


class Route(msgspec.Struct):
    """The filters of a subscriber for one type of event.

    Args:
        early: the filter of `every=` and `start=`, applied by the emitting thread; None without one. With
            overflow="block" it tests `when=` and `once=` as well.
        late: the filter of `when=` and `once=`, applied on a thread of its own; None without one.
    """

    early: Passes | None
    late: Passes | None


class Inbox:
    """The bounded queue of a subscriber, with the temporary file for events beyond its capacity.

    If the subscriber has `when=`, a separate thread calls this filter for each event. An event that does not
    pass is not counted.

    Args:
        account: counts the events.
        options: the capacity and the overflow policy.
        fail: called with the error of a filter, and the event, which then counts as failed.
    """

    def __init__(
        self, account: Account, options: SubscriberOptions, fail: Callable[[BaseException, Event], None]
    ) -> None:
        self.account = account
        self.incoming: deque[Incoming] = deque()
        self.buffer: deque[Queued] = deque()
        self.spill = Spill(account.name, options.capacity)
        self.routes: dict[type[Event], Route] = {}
        # wakes the thread that calls `when=`; only this thread moves events if there is a `when=`
        self.wake_filter: Callable[[], None] | None = None
        self.waits = Timing()  # the times from the emit to the delivery, of some events
        self.moving = threading.Lock()  # held by the thread that moves events into the queue
        self.spills = options.overflow == "spill"
        self.capacity = options.capacity
        self.caught_up = True  # whether `incoming` was empty at some time since the keeper checked it
        self.last_popped: list[Queued] = []
        self.popped_at = float("-inf")  # the time at which `pop` last returned events
        self._timed, self._overflow, self._linger = options.timed, options.overflow, options.linger
        self._fail = fail
        self._has_posts = False  # whether deferred events were ever posted to this subscriber
        self._emitted = perf_counter()  # the last known time of an emit, for events from the temporary file

    # --- putting in (any thread) ---------------------------------------------------------------------------

    def wanted(self, events: Iterable[Event]) -> list[Queued]:
        """Return the events that pass the early filters, for events that the background creates.

        No emit has applied these filters. The late filters are applied later, as for other events.
        """
        return [
            Stamped(event, perf_counter()) if self._timed else event
            for event in events
            if (route := self.routes.get(type(event))) is not None
            and (route.early is None or self.passes(route.early, event))
        ]

    def post(self, types: tuple[type[Event], ...]) -> Pending:
        """Append a placeholder to `incoming` for events that are created later, and return it."""
        self._has_posts = True
        pending = Pending(types)
        self.incoming.append(pending)
        return pending

    def fill(self, pending: Pending, events: list[Event]) -> None:
        """Put the events that pass the filters into a placeholder; do nothing if it has events already."""
        wanted = self.wanted(events)
        with self.account.lock:
            if pending.events is None:
                pending.events = wanted

    def passes(self, test: Passes, event: Event) -> bool:
        """Return whether an event passes a filter.

        If the filter raises an error, it is reported, the event counts as failed, and the result is False. A
        KeyboardInterrupt or SystemExit on the main thread is raised again, because it may come from a signal
        handler.
        """
        try:
            return bool(test(event))
        except BaseException as error:
            in_main = threading.current_thread() is threading.main_thread()
            if isinstance(error, KeyboardInterrupt | SystemExit) and in_main:
                raise
            with self.account.lock:
                self.account.received += 1
                self.account.failed += 1
            self._fail(error, event)
            return False

    def waiting(self) -> int:
        """Return the number of events in `incoming`, except deferred events that are not created yet."""
        if not self._has_posts:
            return len(self.incoming)
        while True:
            with suppress(RuntimeError):  # another thread has emitted, and so changed the list: try again
                return sum(
                    len(item.events or ()) if isinstance(item, Pending) else 1 for item in self.incoming
                )

    def queued(self) -> int:
        """Return the number of events that are not delivered, failed or dropped yet.

        The caller holds the lock of the account.
        """
        return self.account.received + self.waiting() - self.account.handled

    # --- dropping (any thread, with the lock of the account) -----------------------------------------------

    def drop_excess(self) -> None:
        """Drop the oldest events beyond `INCOMING_LIMIT`; emitting threads call this from time to time."""
        while len(self.incoming) > INCOMING_LIMIT:
            self._drop(self.incoming.popleft())

    def drop_late(self) -> None:
        """Remove the events that were emitted after the subscriber's end, and count them as dropped."""
        while self.incoming and self.account.done:
            self._drop(self.incoming.popleft())

    def _drop(self, item: Incoming) -> None:
        """Count an item of `incoming`, which may be a placeholder for several events, as dropped."""
        if isinstance(item, Pending):
            self.drop_each(item.types if item.events is None else map(_type_of, item.events))
        else:
            self.account.drop(_type_of(item), new=True)

    def drop_each(self, event_types: Iterable[type[Event]]) -> None:
        """Count one event of each given type as dropped, if the subscriber receives the type.

        This is how deferred events that were never created are counted, because their number is unknown.
        """
        with self.account.lock:
            for event_type in event_types:
                if event_type in self.routes:
                    self.account.drop(event_type, new=True)

    # --- moving into the queue (any thread, mostly the subscriber's own thread or task, or the keeper) ------

    def move(self, *, own: bool) -> None:
        """Move events from `incoming` into the queue, up to the first deferred event that is not created yet.

        Args:
            own: whether the caller is the thread that delivers next. It moves no event to the temporary file,
                because its delivery will make room in the queue.
        """
        if self.wake_filter is not None:
            self.wake_filter()
            return
        while self.incoming:
            with self.moving:  # released now and then, because the delivering thread may wait for this lock
                for _ in range(MOVED_AT_ONCE):
                    with self.account.lock:
                        event = self._move_until_full(own=own)
                    if event is None:
                        return
                    self.store(event)

    def _move_until_full(self, *, own: bool) -> Event | None:
        """Move events into the queue until it is full; return the first event for the temporary file.

        Return None if there is no such event. The caller holds the lock of the account, and must not hold it
        while it writes the event to the file.
        """
        self.drop_late()
        while (item := self.next_incoming()) is not None:
            must_spill = self.spills and self._full()
            if must_spill and own:
                self.incoming.appendleft(item)
                return None
            self.account.received += 1
            if must_spill:
                return unstamped(item)
            self._append(item)
        return None

    def store(self, item: Queued) -> None:
        """Put an event into the queue; if the queue is full, apply the overflow policy.

        With "spill" the event goes to the temporary file, without its time, or is dropped if the file has no
        room. `_append` applies the other policies.
        """
        if not (self.spills and self._full()):
            with self.account.lock:
                self._append(item)
        elif not self.spill.add(unstamped(item)):
            with self.account.lock:
                self.account.drop(_type_of(item))

    def next_incoming(self) -> Queued | None:
        """Remove and return the next event of `incoming`; None without one, or if it is not created yet."""
        while self.incoming:
            item = self.incoming.popleft()
            if not isinstance(item, Pending):
                return item
            if item.events is None:
                self.incoming.appendleft(item)
                return None
            self.incoming.extendleft(reversed(item.events))
        return None

    def _full(self) -> bool:
        return len(self.buffer) >= self.capacity or self.spill.count > 0

    def _append(self, item: Queued) -> None:
        """Put an event into the queue; if it is full, apply "drop_oldest", "drop_newest" or "latest".

        An event that arrives after the subscriber's end is dropped. The caller holds the lock of the account,
        and applies "spill" itself. With "block" the emitting thread has waited for room; if it must not wait,
        the queue exceeds its capacity.
        """
        if self.account.done or (self._overflow == "drop_newest" and self._full()):
            self.account.drop(_type_of(item))
            return
        self.buffer.append(item)
        if len(self.buffer) > self.capacity and self._overflow in ("drop_oldest", "latest"):
            self.account.displace(_type_of(self.buffer.popleft()))

    # --- taking out (the subscriber's own thread or task) --------------------------------------------------

    def pop(self, most: int) -> list[Any]:
        """Remove and return at most `most` events for a delivery; an empty list if the queue is empty.

        With the option `timed` they are `Stamped`.
        """
        account, most = self.account, min(most, self.capacity)
        with account.lock:
            others_move = self.wake_filter is not None or self.moving.locked()
            has_older = self.buffer or self.spill.count
            # directly from `incoming`, but only if no older event is in the queue or the temporary file
            if self.spills and not (others_move or has_older or account.ended_by):
                return self._started(self._pop_incoming(most))
        self._refill()
        with account.lock:
            count = 0 if account.ended_by else min(most, len(self.buffer))
            return self._started([self.buffer.popleft() for _ in range(count)])

    def _pop_incoming(self, most: int) -> list[Any]:
        """Remove and return at most `most` events directly from `incoming`, past the empty queue."""
        items: list[Any]
        if self._has_posts:
            items = list(islice(iter(self.next_incoming, None), most))
        else:  # faster, because there are no placeholders
            popleft = self.incoming.popleft  # one by one, as other threads append meanwhile
            items = [popleft() for _ in range(min(most, len(self.incoming)))]
        self.account.received += len(items)
        self.caught_up = self.caught_up or not self.incoming
        return items

    def _started(self, items: list[Any]) -> list[Any]:
        """Count events as in flight, record how long they waited, and return them for a delivery.

        With the option `timed` each event is returned as `Stamped`; otherwise events have no times.
        """
        if self._timed or Stamped in map(type, items):
            for index, item in enumerate(items):
                if isinstance(item, Stamped):
                    self._emitted = item.emitted
                    self.waits.add(perf_counter() - item.emitted)
                    items[index] = item if self._timed else item.event
                elif self._timed:
                    items[index] = Stamped(item, self._emitted)
        self.account.in_flight += len(items)
        self.last_popped = items
        if self._linger and items:
            self.popped_at = perf_counter()
        return items

    def put_back(self, undelivered: list[Event]) -> None:
        """Put the last events of a series of deliveries back into the queue, because an earlier one failed.

        If the subscriber has ended, they count as dropped.
        """
        account = self.account
        with account.lock:
            if not account.in_flight:  # the end of the subscriber has counted them already
                return
            account.in_flight -= len(undelivered)
            if account.ended_by:
                account.dropped += len(undelivered)
            else:
                self.buffer.extendleft(reversed(undelivered))

    def _refill(self) -> None:
        """Fill the queue from the temporary file, or from `incoming` if the file is empty."""
        account = self.account
        if self.spill.count and not self.buffer:
            with self.moving:  # a close takes this lock, and so finds each event in the file or in the queue
                if account.ended_by:
                    return
                events, lost = self.spill.read(self.capacity)
                with account.lock:
                    account.dropped += lost
                    if not account.ended_by:
                        self.buffer.extend(events)
        elif self.incoming:
            self.move(own=True)

    def remaining(self) -> Iterator[Event]:
        """Remove and return the events that a close leaves undelivered, in order.

        The temporary file is read while the caller iterates. Deferred events that were never created count as
        dropped. The caller holds the lock of the account.
        """
        newest: list[Event] = []
        while self.incoming:
            item = self.incoming.popleft()
            if isinstance(item, Pending) and item.events is None:
                self._drop(item)
            else:
                events = item.events or () if isinstance(item, Pending) else (item,)
                self.account.received += len(events)
                newest += map(unstamped, events)
        return chain([unstamped(item) for item in self.buffer], self._spilled(), newest)

    def _spilled(self) -> Iterator[Event]:
        while self.spill.count:
            yield from self.spill.read(self.capacity)[0]


def _type_of(item: Queued) -> type[Event]:
    return type(unstamped(item))
