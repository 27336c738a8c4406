"""Count events as dropped for background subscribers of a closed bus."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from eventloop.background.queues.subscriber import Subscriber
from eventloop.events import Event
from eventloop.events.base import event_name

logger = logging.getLogger("eventloop")


class AfterClose:
    """Count events of a closed bus as dropped in place of queuing them, and warn about the first one."""

    def __init__(self) -> None:
        self._warned = False

    def refuse_posted(self, subscribers: Iterable[Subscriber], event_types: Iterable[type[Event]]) -> None:
        """Count one event of each type of a `Deferred` object as dropped, because the bus is closed."""
        for event_type in event_types:
            for subscriber in subscribers:
                if event_type in subscriber.inbox.routes:
                    subscriber.inbox.drop_each([event_type])
                    self._warn_once(event_type, subscriber.name)

    def refuse(self, subscriber: Subscriber, event: Event) -> None:
        """Count an event of a closed bus as dropped if the subscriber's filters let it pass."""
        if _passes(subscriber, event):
            subscriber.inbox.drop_each([type(event)])
            self._warn_once(type(event), subscriber.name)

    def _warn_once(self, event_type: type[Event], name: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s was emitted after the bus was closed: it is dropped and counted for %s, as are all later "
                "events. Close the bus after the last event, or check bus.closed before emitting",
                event_name(event_type),
                name,
            )


def _passes(subscriber: Subscriber, event: Event) -> bool:
    """Return whether an event passes the filters, except a `when=` whose last call has not returned."""
    route, running = (
        subscriber.inbox.routes[type(event)],
        subscriber.filter is not None and subscriber.filter.call,
    )
    tests = [route.early] if running else [route.early, route.late]
    try:
        return all(test is None or test(event) for test in tests)
    except Exception:
        return True
