"""What becomes of events that reach a bus after its close: each is counted as dropped, for each who would have heard."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from eventloop.background.loop import Background
from eventloop.background.queues.subscriber import Route
from eventloop.background.router import charge
from eventloop.bus.routing import RouteTable
from eventloop.events import Event
from eventloop.events.base import event_name
from eventloop.events.deferred import Posted, Stamped

logger = logging.getLogger("eventloop")


class AfterClose:
    """Counts events for the background subscribers that can no longer be given them.

    Args:
        background: the inbox of what was emitted just when it had ended.
        routes: makes the table of who hears what, as of now.
    """

    def __init__(self, background: Background, routes: Callable[[], RouteTable]) -> None:
        self._background = background
        self._routes = routes
        self._told = False

    def refuse_posted(self, event_types: Iterable[type[Event]]) -> None:
        """Somebody posts events of these types that nobody will make: one of each is counted as dropped."""
        table = self._routes()
        for event_type in event_types:
            if names := [route.lane.name for route in table.all(event_type) if route.lane.lose()]:
                self._tell(event_type, names)

    def refuse(self, routes: Iterable[Route], event: Event) -> None:
        """Stands where an event is handed over while the bus is open."""
        ask = not any(route.lane.hangs_in_filter for route in routes)
        if names := [route.lane.name for route in routes if charge(event, route, ask=ask)]:
            self._tell(type(event), names)

    def sweep(self) -> None:
        """Count what was emitted just when the background had ended, for those who are fed from the inbox; together where
        there is no filter to ask, as it may be all that the inbox holds."""
        inbox = self._background.inbox
        if not (self._background.finished and inbox):
            return
        routes = self._routes().by_type()
        filtered = {kind for kind, concerned in routes.items() if any(route.passes for route in concerned)}
        counts: Counter[type[Event]] = Counter()
        with suppress(IndexError):  # another thread may do the same
            while inbox:
                item = inbox.popleft()
                event = item.event if isinstance(item, Stamped) else item
                if isinstance(event, Posted):
                    self.refuse_posted(event.types)
                elif not isinstance(event, Event):
                    self._refuse_counted(routes, counts)  # first: it may be a pause
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
                self._tell(event_type, [lane.name for lane in lanes])
        counts.clear()

    def _tell(self, event_type: type[Event], names: list[str]) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "%s was emitted after the bus was closed: it is dropped and counted for %s, as is all that follows. Close "
                "the bus when everything is emitted, or look at bus.closed before", event_name(event_type), ", ".join(names),
            )  # fmt: skip
