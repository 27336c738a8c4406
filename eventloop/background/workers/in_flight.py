"""Keep the deliveries sent to a worker process until it has acknowledged them."""

from __future__ import annotations

from collections import deque

from eventloop.events.deferred import Queued


class Flights:
    """The deliveries that the worker has not acknowledged, oldest first; each is an event or a batch.

    After the death of a worker all of them are sent again. Deliveries that the dead worker had are sent one
    at a time, each after the acknowledgement of the one before, to find the delivery that kills the worker.
    """

    def __init__(self) -> None:
        self.waiting: deque[list[Queued]] = deque()
        self.sent = 0
        """The number of deliveries that were sent to the current worker."""
        self.suspects = 0
        """The number of events unacknowledged when a worker died, of which one may be the cause."""

    @property
    def events(self) -> int:
        """Return the number of events in all deliveries."""
        return sum(map(len, self.waiting))

    @property
    def unsent(self) -> bool:
        """Return whether there is a delivery that was not sent to the current worker."""
        return self.sent < len(self.waiting)

    @property
    def held(self) -> bool:
        """Return whether the next delivery has to wait for an acknowledgement."""
        return self.suspects > 0 and self.sent > 0

    @property
    def next(self) -> list[Queued]:
        """Return the first delivery that was not sent to the current worker."""
        return self.waiting[self.sent]

    def forget_next(self) -> None:
        """Remove the next delivery, because none of its events can be encoded."""
        del self.waiting[self.sent]

    def land(self, count: int) -> None:
        """Remove the deliveries that were acknowledged; they have `count` events in total."""
        self.suspects = max(0, self.suspects - count)
        while count > 0:
            count -= len(self.waiting.popleft())
            self.sent -= 1

    def clear(self) -> None:
        """Remove all deliveries, because no worker will make them."""
        self.waiting.clear()
        self.sent = self.suspects = 0
