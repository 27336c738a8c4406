"""Keep the deliveries that a worker process has not acknowledged, to send them again if it dies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from eventloop.background.queues.account import Account
from eventloop.background.queues.runner import Delivery
from eventloop.events import Event
from eventloop.events.deferred import Queued, unstamped


class Flights:
    """The deliveries that the worker has not acknowledged, oldest first; each is an event or a batch.

    After the death of a worker all of them are sent to the next worker. Those that the dead worker had are
    sent one at a time: each waits for the acknowledgement of the delivery before it. So the delivery that
    kills workers is found.

    Args:
        account: counts the events.
        most: the largest batch; 0 if events are sent one by one.
    """

    def __init__(self, account: Account, most: int) -> None:
        self.most = most
        self.waiting: deque[list[Queued]] = deque()
        self.sent = 0
        """The number of these deliveries that were sent to the current worker."""
        self.suspects = 0
        """The number of events that may have caused the death of the last worker, 0 without a death.

        They are the events that it had and that its successor has not acknowledged yet. While there are any,
        deliveries are sent one at a time.
        """
        self.unconfirmed: deque[Queued] = deque()
        """The acknowledged events that the destination has not accepted; a death of the worker loses them."""
        self._account = account

    @property
    def events(self) -> int:
        """Return the number of events in all deliveries."""
        return sum(map(len, self.waiting))

    @property
    def unsent(self) -> bool:
        """Return whether a delivery was not sent to the current worker yet."""
        return self.sent < len(self.waiting)

    @property
    def held(self) -> bool:
        """Return whether the next delivery has to wait for an acknowledgement."""
        return self.suspects > 0 and self.sent > 0

    @property
    def next(self) -> list[Queued]:
        """Return the first delivery that was not sent to the current worker."""
        return self.waiting[self.sent]

    def remove_next(self) -> None:
        """Remove the next delivery, because none of its events can be encoded."""
        del self.waiting[self.sent]

    def acknowledge(self, count: int) -> None:
        """Remove the oldest deliveries, which were acknowledged and have `count` events in total."""
        self.suspects = max(0, self.suspects - count)  # the worker has survived the acknowledged events
        while count > 0:
            count -= len(self.waiting.popleft())
            self.sent -= 1

    def clear(self) -> None:
        """Remove all deliveries, because no worker will receive them."""
        self.waiting.clear()
        self.sent = self.suspects = 0

    def drop(self) -> None:
        """Remove all deliveries, and count their events as dropped."""
        with self._account.lock:
            self._account.dropped += self.events
            self._account.in_flight -= self.events
        self.clear()

    def retain_unconfirmed(self, count: int, unconfirmed: int) -> None:
        """Keep the last acknowledged events, which the destination has not accepted.

        It is called before `acknowledge`.

        Args:
            count: the number of events that the worker acknowledges now.
            unconfirmed: the number of events to keep.
        """
        acknowledged = (item for delivery in self.waiting for item in delivery)
        self.unconfirmed.extend(islice(acknowledged, count))
        while len(self.unconfirmed) > unconfirmed:
            self.unconfirmed.popleft()
        self._account.unconfirmed = len(self.unconfirmed)

    def resend_unconfirmed(self) -> None:
        """Add the acknowledged events that a dead worker has lost, as the first deliveries to send again."""
        events, size = list(self.unconfirmed), self.most or 1
        self.unconfirmed.clear()
        with self._account.lock:
            self._account.unconfirmed = 0
            self._account.delivered -= len(events)
            self._account.in_flight += len(events)
        deliveries = [events[begin : begin + size] for begin in range(0, len(events), size)]
        self.waiting.extendleft(reversed(deliveries))

    def all_events(self) -> list[Event]:
        """Return the events that are not acknowledged or not accepted by the destination, oldest first."""
        deliveries = [list(self.unconfirmed), *self.waiting]
        return [unstamped(item) for delivery in deliveries for item in delivery]

    def as_delivered(self, items: list[Queued]) -> Delivery | None:
        """Return a delivery as the handler receives it: an event or a list; None without an event."""
        events = [unstamped(item) for item in items]
        return events if self.most or len(events) != 1 else events[0]

    def with_spans(
        self, count: int, spans: list[tuple[float, float]]
    ) -> Iterator[tuple[Delivery | None, tuple[float, float]]]:
        """Yield the deliveries that the worker acknowledges now, each with its begin and its seconds.

        Args:
            count: the number of acknowledged events, which belong to the oldest deliveries.
            spans: the begin and the seconds of each delivery. The first deliveries have no item if they were
                made before the recording began.
        """
        acknowledged: list[list[Queued]] = []
        for delivery in self.waiting:
            if count <= 0:
                break
            acknowledged.append(delivery)
            count -= len(delivery)
        recent = acknowledged[max(0, len(acknowledged) - len(spans)) :]
        yield from zip(map(self.as_delivered, recent), spans, strict=False)
