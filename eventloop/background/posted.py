"""Define a `Deferred` object that was posted, with the placeholders for its events in the queues."""

from __future__ import annotations

from eventloop.background.queues.subscriber import Subscriber
from eventloop.events import Event
from eventloop.events.deferred import Deferred, Pending
from eventloop.util.waiting import Latch


class Posted:
    """A `Deferred` object that was posted, and a placeholder for its events in each subscriber's queue."""

    def __init__(self, deferred: Deferred, placeholders: list[tuple[Subscriber, Pending]]) -> None:
        self.deferred = deferred
        self.made = Latch()
        """Set once the events are created and in the queues, or could not be created."""
        self._placeholders = placeholders

    def fill(self, events: list[Event]) -> None:
        """Put the events in place of the placeholders."""
        for subscriber, pending in self._placeholders:
            subscriber.inbox.fill(pending, events)

    def drop(self) -> None:
        """Remove the placeholders, and count one event of each type as dropped: none could be created."""
        self.fill([])
        for subscriber, pending in self._placeholders:
            subscriber.inbox.drop_each(pending.types)
