"""Count the events of one background subscriber.

One lock guards the counters. It is never held while a handler, a filter or a disk operation runs.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from eventloop.background.queues.options import LaneOptions
from eventloop.background.queues.spill import Spill
from eventloop.events import Event, EventsDropped
from eventloop.events.deferred import Pending, Queued, unstamped
from eventloop.events.encoding_errors import bad_events
from eventloop.events.filters import Passes
from eventloop.util.waiting import Latch

Incoming = Queued | Pending


@dataclass(slots=True)
class Route:
    """The filters of a subscriber for one type of event.

    Args:
        early: the filter of `every=` and `start=`, applied at the emit; None without one.
        late: the filter of `when=` and `once=`, applied on the subscriber's own thread; None without one.
    """

    early: Passes | None
    late: Passes | None


class Account(NamedTuple):
    """A copy of the counters at one moment: numbers of events, except `calls` and their `seconds`."""

    calls: int
    seconds: float
    delivered: int
    dropped: int
    failed: int
    queued: int
    peak: int
    spilled: int
    untaken: int
    """Those of `delivered` that the destination has not taken yet."""


class SubscriberAccount(ABC):
    """The counters of a subscriber, and the list to which emits append its events.

    At any moment `emitted == delivered + failed + dropped + queued`, because `queued` is computed from the
    others.
    """

    def __init__(self, name: str, options: LaneOptions) -> None:
        self.name = name
        self.options = options
        self.incoming: deque[Incoming] = deque()
        self.routes: dict[type[Event], Route] = {}
        self.ended_by = ""  # why it takes no more events: "error", "stalled", "cancelled", "closed"
        self.closed = Latch()  # set after `on_close`
        self.forgotten = False  # whether its events are those of the process that has forked this one
        self.received = self.delivered = self.failed = self.dropped = self.calls = self.peak = 0
        self.seconds = 0.0
        self._lock = threading.RLock()  # reentrant, as a filter may look at the account
        self._turned_away = 0  # events dropped while older events stayed in the queue
        self._has_posts = False  # whether deferred events were ever posted to it
        self._losses_told = 0, 0  # dropped and failed
        self._drops_told = 0
        self._drops_told_at = float("-inf")
        self._spill = Spill(name, options.capacity)
        self.untaken = 0  # events counted as delivered that the destination has not taken yet
        self._in_flight = 0  # events taken out of the queue whose delivery is not counted yet
        self._progress = [0]  # how many of them are delivered; a new list for each run of deliveries

    @property
    def account(self) -> Account:
        """Return a copy of the counters, exact at the moment of the call."""
        self._bring_up_to_date()
        with self._lock:
            self._drop_late()
            queued, delivered = self._queued(), self.delivered + self._progress[0]
            self.peak = max(self.peak, queued - self._in_flight)
            return Account(
                self.calls, self.seconds, delivered, self.dropped, self.failed, queued, self.peak,
                self._spill.total, min(self.untaken, delivered),
            )  # fmt: skip

    @property
    def queued(self) -> int:
        """Return the number of emitted events that are not yet delivered, failed or dropped."""
        return self.account.queued

    @property
    def emitted(self) -> int:
        """Return the number of events emitted for this subscriber."""
        with self._lock:
            return self.received + self._waiting_outside()

    @property
    def done(self) -> bool:
        """Return whether the queue takes no more events."""
        return bool(self.ended_by) or self.closed.is_set()

    def _queued(self) -> int:
        settled = self.delivered + self._progress[0] + self.failed + self.dropped
        return self.received + self._waiting_outside() - settled

    def _waiting_outside(self) -> int:
        """Return the number of events in `incoming`, except deferred events that are not created yet."""
        if not self._has_posts:
            return len(self.incoming)
        while True:
            with suppress(RuntimeError):  # another thread has emitted during the iteration
                return sum(
                    len(item.events or ()) if isinstance(item, Pending) else 1 for item in self.incoming
                )

    def _drop_late(self) -> None:
        """Count events as dropped that were emitted after the subscriber ended."""
        if self.done:
            while self.incoming:
                item = self._pop_incoming(dropped=True)
                if isinstance(item, Pending):
                    self._drop_pending(item)

    def _drop_pending(self, pending: Pending) -> None:
        """Count deferred events as dropped.

        If they were never created, their number is unknown, and one event of each posted type is counted.
        """
        events = pending.events
        for event_type in pending.types if events is None else map(type_of, events):
            if event_type in self.routes:
                self.received += 1
                self._turn_away(event_type, 1)

    def _pop_incoming(self, *, dropped: bool = False) -> Incoming:
        item = self.incoming.popleft()
        if isinstance(item, Pending):
            return item
        self.received += 1
        if dropped:
            self._turn_away(type_of(item), 1)
        return item

    def _turn_away(self, event_type: type[Event], count: int) -> None:
        self.dropped += count
        self._turned_away += count
        if event_type is EventsDropped:  # not reported: the report would be dropped here again, forever
            self._drops_told += count

    def go_on_from(self, former: SubscriberAccount) -> None:
        """Continue the account of a former, ended subscriber; its undelivered events count as dropped."""
        now = former.account
        self.received = now.delivered + now.failed + now.dropped + now.queued
        self.calls, self.seconds, self.delivered, self.failed = (
            now.calls,
            now.seconds,
            now.delivered,
            now.failed,
        )
        self.dropped, self.peak, self._spill.total = now.dropped + now.queued, now.peak, now.spilled
        self._turned_away = former._turned_away
        self._drops_told, self._losses_told = self.dropped, (self.dropped, self.failed)

    def forget(self) -> None:
        """Note in a forked child process that the delivering thread or task exists only in the parent."""
        self._lock = threading.RLock()  # that thread may have held it when the process was copied
        self.forgotten = True
        self.closed.set()

    def new_losses(self) -> str:
        """Describe the dropped and failed events; "" if there are no more than at the last call."""
        now = self.account
        lost, told = (now.dropped, now.failed), self._losses_told
        self._losses_told = lost
        came = now.delivered + now.dropped + now.failed + now.queued
        return "" if lost == told else f"{self.name}: {lost[0]:,} dropped, {lost[1]:,} failed of {came:,}"

    def new_drops(self, now: float, every: float) -> int:
        """Return the number of events dropped since the last report; 0 within `every` seconds after it."""
        with self._lock:
            self._drop_late()
            count = self.dropped - self._drops_told
            if not count or now - self._drops_told_at < every:
                return 0
            self._drops_told += count
            self._drops_told_at = now
            return count

    def lose_each(self, event_types: Iterable[type[Event]]) -> None:
        """Count one event of each type that the subscriber wants as dropped."""
        for event_type in event_types:
            if event_type in self.routes:
                self.lose(event_type)

    def lose(self, event_type: type[Event]) -> None:
        """Count one event of a type as dropped before it reached the queue."""
        with self._lock:
            self.received += 1
            self._turn_away(event_type, 1)

    def _charge(self, error: BaseException, count: int) -> None:
        """Count a failed delivery of `count` events.

        If the error names events that cannot be encoded, only these have failed.
        """
        failed = len(bad_events(error, count)) or count
        self.failed += failed
        self.delivered += count - failed

    @abstractmethod
    def _bring_up_to_date(self) -> None:
        """Apply filters and the overflow policy to the emitted events, as far as this does not take long."""


def type_of(item: Queued) -> type[Event]:
    return type(unstamped(item))
