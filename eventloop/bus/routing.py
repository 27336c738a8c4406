"""Which background subscriber hears which event, and by which way it gets there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from eventloop.background.queues.subscriber import Route
from eventloop.bus.subscription import Subscription
from eventloop.events import Event


class RouteTable:
    """The routes of all background subscriptions, by event type.

    An event normally goes to the inbox, and from there to every lane. A subscriber with overflow="block" must be
    able to hold the emitting thread, so it is fed at the emit itself, through a gate; but not for background-born
    events, which never pass the emitting thread.
    """

    def __init__(
        self, subscriptions: Iterable[Subscription], types_of: Callable[[Subscription], Iterable[type[Event]]]
    ) -> None:
        self._routes: dict[type[Event], list[Route]] = {}
        for subscription in subscriptions:
            if subscription.lane is not None:
                for event_type in types_of(subscription):
                    self._routes.setdefault(event_type, []).append(subscription.route(event_type))

    def all(self, event_type: type[Event]) -> list[Route]:
        """The routes of all who hear it."""
        return self._routes.get(event_type, [])

    def gated(self, event_type: type[Event]) -> list[Route]:
        """The routes that are fed at the emit."""
        return [
            r
            for r in self.all(event_type)
            if r.lane.options.overflow == "block" and not event_type.background_born
        ]

    def routed(self, event_type: type[Event]) -> list[Route]:
        """The routes that are fed from the inbox."""
        gated = self.gated(event_type)
        return [r for r in self.all(event_type) if r not in gated]

    def by_type(self) -> dict[type[Event], tuple[Route, ...]]:
        """What the background loop routes by."""
        return {event_type: tuple(self.routed(event_type)) for event_type in self._routes}
