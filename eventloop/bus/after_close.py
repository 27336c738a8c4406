"""Count events as dropped for background subscribers of a closed bus."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from eventloop.background.queues.subscriber import Subscriber
from eventloop.events import Event
from eventloop.events.base import event_name

logger = logging.getLogger("eventloop")


class AfterClose:
    """Count events that are emitted on a closed bus as dropped, and log a warning about the first one."""

    def __init__(self) -> None:
        self._warned = False

    def refuse_posted(self, subscribers: Iterable[Subscriber], event_types: Iterable[type[Event]]) -> None:
        """Count one event of each given type as dropped for each of its subscribers.

        A `Deferred` object that was posted to the closed bus would have created events of these types.
        """
        for event_type in event_types:
            for subscriber in subscribers:
                if event_type in subscriber.inbox.routes:
                    subscriber.inbox.drop_each([event_type])
                    self._warn_once(event_type, subscriber.name)

    def refuse(self, subscriber: Subscriber, event: Event) -> None:
        """Count an event as dropped for a subscriber, if it passes the subscriber's filters."""
        if _passes(subscriber, event):
            subscriber.inbox.drop_each([type(event)])
            self._warn_once(type(event), subscriber.name)

    def _warn_once(self, event_type: type[Event], name: str) -> None:
        """Log a warning about the first event, which the subscriber `name` misses."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s was emitted after the bus was closed: it is dropped and counted for %s, as are all later "
                "events. Close the bus after the last event, or check bus.closed before emitting",
                event_name(event_type),
                name,
            )


def _passes(subscriber: Subscriber, event: Event) -> bool:
    """Return whether an event passes the filters of a subscriber; True if a filter raises an error.

    The `early` filter of a route tests `every=` and `start=`, the `late` one `when=` and `once=`. If an
    earlier call of `when=` has not returned, the `late` filter is left out.
    """
    route = subscriber.inbox.routes[type(event)]
    when_is_running = subscriber.filter is not None and subscriber.filter.call
    filters = [route.early] if when_is_running else [route.early, route.late]
    try:
        return all(passes is None or passes(event) for passes in filters)
    except Exception:
        return True
