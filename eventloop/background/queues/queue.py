"""Hold the events that wait for a background subscriber, up to the capacity of its queue.

When the queue is full, the overflow policy decides. `eventloop.background.queues.subscriber` builds on it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from time import perf_counter

from eventloop.background.queues.account import LaneAccount
from eventloop.background.queues.filter_watchdog import Asking, is_signal
from eventloop.background.queues.options import LaneOptions
from eventloop.background.queues.spill import Spill
from eventloop.costs.sampling import Waits
from eventloop.events import Event
from eventloop.events.filters import Passes
from eventloop.util.waiting import Bell, Latch

_LOOK_SECONDS = 0.05
"""How often a thread that waits for room checks whether there will ever be any."""

Delivery = Event | list[Event]


class LaneQueue(LaneAccount, ABC):
    """The bounded queue of a subscriber, with its spill file and account.

    The router, or with overflow="block" the emitting thread, puts events in; the delivering side takes them
    out.
    """

    def __init__(self, name: str, options: LaneOptions) -> None:
        super().__init__(name)
        self.options = options
        self.buffer: deque[Event] = deque()
        self.waits = Waits()  # of sampled events, from their emit to the begin of their delivery
        self.paused = False
        self.ended_by = ""  # why it takes no more events: "error", "stalled", "cancelled", "closed"
        self.closed = Latch()  # set after `on_close`
        self._capacity = options.capacity
        self._most = options.most
        self._began = 0.0  # when the delivery, or the callback, under way began; 0.0 when there is none
        self._item: Delivery | None = None  # what is being delivered
        self._in_flight = 0  # how many of its events are not accounted for
        self._asking = Asking()
        self._mute = False  # its filter hung: it is asked no more
        self._spill = Spill(name, self._capacity, self._account)  # stays empty with another policy
        self._spills = options.overflow == "spill"
        self._feeding = threading.Lock()
        self._room = Bell()

    @property
    def spilled(self) -> int:
        """Return how many events exceeded the queue's capacity and waited encoded."""
        return self._spill.total

    @property
    def done(self) -> bool:
        """Return whether the queue takes no more events."""
        return bool(self.ended_by) or self.closed.is_set()

    # --- putting in: the router, or with overflow="block" the emitting thread ------------------------------

    def put(self, event: Event, passes: Passes | None, emitted: float = 0.0) -> None:
        """Accept an event, applying the filter and the overflow policy, without waiting for the subscriber.

        `emitted` is the time of the emit by `perf_counter`, for an event whose wait is measured.
        """
        if self._asked(event, passes):
            self._accept(event, emitted)

    def put_many(self, events: list[Event]) -> bool:
        """Accept events without a filter in their order, locking the account once.

        Returns False if there is no room for all of them: then each has to be `put`, which may wait for a
        disk.
        """
        if self.paused:
            return True
        with self._feeding, self._account:  # see `_accept`
            waiting = len(self.buffer) + len(events)
            if waiting <= self._capacity and not self._spill.count and not self.done:
                self.accepted += len(events)
                self.buffer.extend(events)
                self.peak = max(self.peak, waiting)
                return True
        return False

    def _accept(self, event: Event, emitted: float = 0.0) -> None:
        if not self._spills:
            self._enter(event, emitted)
            return
        with self._feeding:  # not the account's lock: readers of the account must not wait for a disk
            with self._account:  # else a refill might move the last events from the file while this looks
                full = self._full()
            frame = self._spill.frame(event) if full and not self.done else None
            self._enter(event, emitted, frame)
            if frame:
                self._spill.write_out()

    def _enter(self, event: Event, emitted: float, frame: bytes | None = None) -> None:
        with self._account:
            self.accepted += 1
            full = self._full()
            if self.done or (full and not (frame or self._make_room())):
                self._turn_away(type(event), 1)
                return
            if full and frame:
                self._spill.add(frame, event)
            else:
                self.buffer.append(event)
            waiting = len(self.buffer) + self._spill.count
            self.peak = max(self.peak, waiting)
            if emitted:
                self.waits.begin(emitted, waiting - 1)

    def lose(self, event: Event | None = None, passes: Passes | None = None) -> bool:
        """Count an event as dropped before it reached the queue; return False if the filter rejects it."""
        if event is not None and not self._asked(event, passes):
            return False
        self.lose_many(type(event), 1)
        return True

    @property
    def being_fed(self) -> bool:
        """Return whether a thread is putting an event in, which may wait for the disk of the spill file."""
        return self._feeding.locked()

    @property
    def hangs_in_filter(self) -> bool:
        """Return whether a thread is in a filter that may never return."""
        return self._asking.hangs()

    def _asked(self, event: Event, passes: Passes | None) -> bool:
        """Return whether the filter accepts an event, under the watch for filters that hang.

        While a call of the filter hangs, other events count as dropped without a call, wanted or not.
        """
        if self.paused or passes is None:
            return not self.paused
        if self._mute or (self._asking.asked and self._asking.hangs()):
            self.lose()
            return False
        answer = self._asking.ask(passes, event)
        if isinstance(answer, BaseException):
            self._filter_failed(answer, event)
        return answer is True

    def _concerned(self, event: Event, passes: Passes | None) -> bool:
        """Return whether the filter accepts an event, on the emitting thread, without watching the call."""
        if self.paused or passes is None:
            return not self.paused
        try:
            return bool(passes(event))
        except BaseException as error:
            if is_signal(error):
                raise
            self._filter_failed(error, event)
            return False

    def _filter_failed(self, error: BaseException, event: Event) -> None:
        self._charge_failure()
        self._failure(error, event, 0.0)

    def _full(self) -> bool:
        return len(self.buffer) >= self._capacity or self._spill.count > 0

    def _make_room(self) -> bool:
        if self.options.overflow in ("drop_newest", "spill"):
            return False
        if self.options.overflow != "block":  # there the producer has waited already
            self.buffer.popleft()
            self.dropped += 1
            self.waits.lost(1)
        return True

    def put_or_wait(
        self, event: Event, passes: Passes | None, wake: Callable[[], None], look: Callable[[], None]
    ) -> None:
        """Accept an event once there is room for it; called on the emitting thread with overflow="block"."""
        if self._concerned(event, passes):
            emitted = perf_counter()
            self.wait_for_room(wake, look)
            self._accept(event, emitted)

    def wait_for_room(self, wake: Callable[[], None], look: Callable[[], None]) -> None:
        """Wait while the queue is full and open, calling `look` meanwhile to end stalled subscribers."""
        if self._has_room():
            return
        wake()
        while not self._room.wait_for(self._has_room, _LOOK_SECONDS):
            look()

    def _has_room(self) -> bool:
        return self.queued < self._capacity or self.done

    # --- taking out: the lane's own side -------------------------------------------------------------------

    def _take(self) -> Delivery | None:
        """Return the next delivery, None if there is nothing to deliver."""
        while self._spill.count and not self.buffer and not self.ended_by:
            lost = self._spill.refill(self.buffer)
            with self._account:
                self.dropped += lost
                self.waits.lost(lost)
        with self._account:
            if not self.buffer or self.ended_by:
                return None
            if self._most:
                self._item = self._next_batch()
                self._in_flight = len(self._item)
            else:
                self._item = self.buffer.popleft()
                self._in_flight = 1
            self._began = perf_counter()
            self.waits.taken(self._in_flight, self._began)
            return self._item

    def _next_batch(self) -> list[Event]:
        buffer = self.buffer
        if len(buffer) > self._most:
            return [buffer.popleft() for _ in range(self._most)]
        batch = list(buffer)
        buffer.clear()
        return batch

    @abstractmethod
    def _failure(self, error: BaseException, item: Delivery | None, took: float) -> None:
        """Report an error that an event caused."""
