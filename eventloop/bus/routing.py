"""Route events to background subscribers, and count events after a close as dropped.

`Subscribers` builds a new table at each change of its subscriptions.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from eventloop.background.loop import Background
from eventloop.background.queues.subscriber import Route
from eventloop.background.router import charge
from eventloop.bus.subscription import Subscription
from eventloop.events import Event
from eventloop.events.base import event_name
from eventloop.events.deferred import Posted, Stamped

logger = logging.getLogger("eventloop")


class RouteTable:
    """The routes of all background subscriptions, by event type.

    An event normally goes to the inbox, and from there to the queue of every subscriber. A subscriber with
    overflow="block" must be able to block the emitting thread, so the emit itself puts the event into its
    queue. Background-born events, which never pass the emitting thread, always come from the inbox.
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
        """Return the routes of all subscribers of an event."""
        return self._routes.get(event_type, [])

    def gated(self, event_type: type[Event]) -> list[Route]:
        """Return the routes of blocking subscribers, which receive an event at the emit."""
        return [
            r
            for r in self.all(event_type)
            if r.lane.options.overflow == "block" and not event_type.background_born
        ]

    def routed(self, event_type: type[Event]) -> list[Route]:
        """Return the routes that receive an event from the inbox."""
        gated = self.gated(event_type)
        return [r for r in self.all(event_type) if r not in gated]

    def by_type(self) -> dict[type[Event], tuple[Route, ...]]:
        """Return the routes from the inbox by event type, for the background loop."""
        return {event_type: tuple(self.routed(event_type)) for event_type in self._routes}


class AfterClose:
    """Count events as dropped for background subscribers that can no longer receive them.

    Args:
        background: the loop whose inbox may hold events emitted just as it ended.
        routes: returns the current table of routes.
    """

    def __init__(self, background: Background, routes: Callable[[], RouteTable]) -> None:
        self._background = background
        self._routes = routes
        self._warned = False

    def refuse_posted(self, event_types: Iterable[type[Event]]) -> None:
        """Count one event of each type as dropped, for a posted deferred that will not be created."""
        table = self._routes()
        for event_type in event_types:
            if names := [route.lane.name for route in table.all(event_type) if route.lane.lose()]:
                self._warn_once(event_type, names)

    def refuse(self, routes: Iterable[Route], event: Event) -> None:
        """Count an event as dropped, in place of handing it over."""
        ask = not any(route.lane.hangs_in_filter for route in routes)
        if names := [route.lane.name for route in routes if charge(event, route, ask=ask)]:
            self._warn_once(type(event), names)

    def sweep(self) -> None:
        """Count the events that were still put into the inbox just as the background ended.

        Events without a filter are counted by type, because the inbox may be full.
        """
        inbox = self._background.inbox
        if not (self._background.finished and inbox):
            return
        routes = self._routes().by_type()
        filtered = {kind for kind, concerned in routes.items() if any(route.passes for route in concerned)}
        counts: Counter[type[Event]] = Counter()
        with suppress(IndexError):  # another thread may empty the inbox too
            while inbox:
                item = inbox.popleft()
                event = item.event if isinstance(item, Stamped) else item
                if isinstance(event, Posted):
                    self.refuse_posted(event.types)
                elif not isinstance(event, Event):
                    self._refuse_counted(routes, counts)  # first, because the call may pause a subscriber
                    event()
                elif type(event) in filtered:
                    self.refuse(routes[type(event)], event)
                else:
                    counts[type(event)] += 1
        self._refuse_counted(routes, counts)

    def _refuse_counted(
        self, routes: Mapping[type[Event], tuple[Route, ...]], counts: Counter[type[Event]]
    ) -> None:
        for event_type, count in counts.items():
            lanes = [route.lane for route in routes.get(event_type, ()) if not route.lane.paused]
            for lane in lanes:
                lane.lose_many(event_type, count)
            if lanes:
                self._warn_once(event_type, [lane.name for lane in lanes])
        counts.clear()

    def _warn_once(self, event_type: type[Event], names: list[str]) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s was emitted after the bus was closed: it is dropped and counted for %s, as are all later "
                "events. Close the bus after the last event, or check bus.closed before emitting",
                event_name(event_type), ", ".join(names),
            )  # fmt: skip
