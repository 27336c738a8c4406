"""Hold a `Deferred` object until its events can be created, and their places in the queues."""

from __future__ import annotations

from eventloop.background.queues.subscriber import Subscriber
from eventloop.events import Event
from eventloop.events.deferred import Deferred, Pending
from eventloop.util.waiting import Latch


class Posted:
    """A `Deferred` object, and the places that the queues of its subscribers keep for its events."""

    def __init__(self, deferred: Deferred, places: list[tuple[Subscriber, Pending]]) -> None:
        self.deferred = deferred
        self.made = Latch()
        """Set once the events are in their places."""
        self._places = places

    def fill(self, events: list[Event]) -> None:
        """Put the events in their places."""
        for subscriber, pending in self._places:
            subscriber.inbox.fill(pending, events)

    def drop(self) -> None:
        """Empty the places, because the events cannot be created, and count one of each type as dropped."""
        self.fill([])
        for subscriber, pending in self._places:
            subscriber.inbox.drop_each(pending.types)
