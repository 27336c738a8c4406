"""What a process lane has sent, or is about to send, and the worker has not acknowledged."""

from __future__ import annotations

from collections import deque

from eventloop.events import Event


class Flights:
    """Deliveries in order, the oldest first; a delivery is one event, or a batch.

    After a death all of them are sent again, one at a time until those are acknowledged that the dead worker had: so it
    is known what the next one dies of.
    """

    def __init__(self) -> None:
        self.waiting: deque[list[Event]] = deque()
        self.sent = 0
        """How many of them this worker was sent."""
        self.suspects = 0
        """Events that a worker had when it died."""

    @property
    def events(self) -> int:
        """How many events they are."""
        return sum(map(len, self.waiting))

    @property
    def unsent(self) -> bool:
        """True when this worker was not sent all of them."""
        return self.sent < len(self.waiting)

    @property
    def held(self) -> bool:
        """True when the next one has to wait for an acknowledgement."""
        return self.suspects > 0 and self.sent > 0

    @property
    def next(self) -> list[Event]:
        """The first that this worker was not sent."""
        return self.waiting[self.sent]

    def forget_next(self) -> None:
        """Nothing of it can be sent."""
        del self.waiting[self.sent]

    def land(self, count: int) -> None:
        """So many events are acknowledged; whole deliveries."""
        self.suspects = max(0, self.suspects - count)
        while count > 0:
            count -= len(self.waiting.popleft())
            self.sent -= 1

    def clear(self) -> None:
        """None of them will be delivered."""
        self.waiting.clear()
        self.sent = self.suspects = 0
