"""Route events to the queues of their subscribers, on the background loop's thread."""

from __future__ import annotations

import logging
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from math import inf
from threading import get_ident
from time import monotonic
from typing import TypeVar

from eventloop.background.queues.subscriber import Lane, Route
from eventloop.costs.counting import DELIVERY_PERIOD, WARM_UP
from eventloop.events import Event
from eventloop.events.deferred import Posted, Stamped

logger = logging.getLogger("eventloop")

T = TypeVar("T")
Item = Event | Stamped | Posted | Callable[[], None]
"""What the inbox holds: an event, a stamped event, events made later, or a call in its turn."""
Routes = dict[type[Event], tuple[Route, ...]]


RUN = 64
"""The largest number of events routed together."""


class Router:
    """Put events into the queues of their subscribers, in the order of the emits.

    Events that are available together make a run: a queue takes all of its own at once, at a fifth of the
    time. Before foreign code is called, a filter or a deferred that may take its time, everything before it
    has been handed over.

    A bus that closes at its deadline takes the rest of `run`, `asking` and `waiting` from another thread.

    Args:
        latest: receives the last event of each type that the background emits.
    """

    def __init__(self, latest: dict[type[Event], Event]) -> None:
        self.routes: Routes = {}
        """Routes by type of event; replaced as a whole, so that no thread sees a part of a table."""
        self.run: deque[Event] = deque()
        """Events that are about to be routed."""
        self.asking: deque[tuple[Event, Route, float]] = deque()
        """Routes still to be served for the event under way, with its `emitted`.

        They have filters to call, or a queue that may wait for a disk.
        """
        self.waiting: deque[Item] = deque()
        """Events whose values are not ready, and everything after them."""
        self._askers: list[int] = []  # the threads that are in a filter
        self._published = self._in_use = 0  # routing tables, by number
        self.asks = True
        """False at the end of a close: filters are not called, and their subscribers count drops."""
        self._latest = latest
        self._read = 0  # deferreds whose events were made

    def publish(self, routes: Routes) -> Callable[[], None]:
        """Return the call that puts a routing table to use, at once or in its turn behind earlier events.

        It does nothing if a newer table is in use, or after `close`.
        """
        self._published += 1
        return partial(self._use, routes, self._published)

    def _use(self, routes: Routes, number: int) -> None:
        if number > self._in_use:
            self.routes, self._in_use = routes, number

    @property
    def coming(self) -> bool:
        """Return whether a table waits for its turn; it may have filters that this one has not."""
        return self._in_use < self._published

    def close(self) -> None:
        """Drop all routes."""
        self._use({}, sys.maxsize)

    def lanes_of(self, types: Iterable[type[Event]]) -> Iterator[Lane]:
        """Return the queues of the subscribers to any of the types; safe from any thread."""
        return (route.lane for event_type in types for route in self.routes.get(event_type, ()))

    def take(self) -> None:
        """Move waiting items to the run, up to the first whose values are not ready.

        A call, such as the mark of `route_now`, waits for everything before it.
        """
        while (item := _next(self.waiting)) is not None:
            if isinstance(item, Event):
                self.run.append(item)
                if len(self.run) >= RUN:
                    self.route_run()
                continue
            prompt = isinstance(item, Posted) and getattr(item.deferred, "prompt", False)
            if not prompt and self.run:  # back, not in hand: where that hangs, a close counts what is left
                self.waiting.appendleft(item)
                self.route_run()
                continue
            if isinstance(item, Stamped):
                self.route(item.event, emitted=item.emitted)
            elif not isinstance(item, Posted):
                item()
            elif not self._make(item):
                self.waiting.appendleft(item)
                return

    def _make(self, posted: Posted) -> bool:
        """Add the events of a deferred to the run; return False if its values are not ready.

        A deferred that fails is dropped. Waits are measured for the first deferreds and then for some, as
        deliveries are.
        """
        try:
            if not posted.deferred.ready():
                return False
            events = list(posted.deferred.events())
        except BaseException:  # a SystemExit of foreign code would end the whole loop
            logger.exception("events could not be made: %r", posted.deferred)
            self._lose(posted)
            return True
        self._read += 1
        if self._read > WARM_UP and self._read % DELIVERY_PERIOD:
            self.run += events
            return True
        self.route_run()
        for event in events:
            self.route(event, emitted=posted.emitted)
        return True

    def route_run(self) -> None:
        """Route the events of the run in their order, with the same result as `route` for each."""
        pending: dict[Lane, list[Event]] = {}
        while (event := _next(self.run)) is not None:
            if event.background_born:
                self._latest[type(event)] = event
            for route in self.routes.get(type(event), ()):
                if route.passes is not None:
                    self.asking.append((event, route, 0.0))
                elif (events := pending.get(route.lane)) is None:
                    pending[route.lane] = [event]
                else:
                    events.append(event)
            if self.asking:
                self._hand_over(pending)
        self._hand_over(pending)

    def _hand_over(self, pending: dict[Lane, list[Event]]) -> None:
        for lane, events in pending.items():
            if not lane.put_many(events):
                route = Route(lane, None)
                self.asking.extendleft((event, route, 0.0) for event in reversed(events))
        pending.clear()
        self._ask()

    def route(self, event: Event, but: Lane | None = None, emitted: float = 0.0) -> None:
        """Put an event into the queue of each of its subscribers except `but`.

        `emitted` is the time of the emit, for an event whose wait is measured.
        """
        if event.background_born:
            self._latest[type(event)] = event
        routes = [route for route in self.routes.get(type(event), ()) if route.lane is not but]
        self.asking.extend((event, route, emitted) for route in routes if route.passes is None)
        self.asking.extend((event, route, emitted) for route in routes if route.passes is not None)
        self._ask()

    def _ask(self) -> None:
        """Serve the routes of `asking`; those with filters come last, as a filter may never return."""
        asking = self.asking
        while asking:
            try:  # another thread may take them too
                event, route, emitted = asking.popleft()
            except IndexError:
                return
            if route.passes is None:
                route.lane.put(event, None, emitted)
            elif self.asks:
                self._askers.append(here := get_ident())
                try:
                    route.lane.put(event, route.passes, emitted)
                finally:
                    self._askers.remove(here)
            else:
                charge(event, route, ask=False)

    @property
    def asks_here(self) -> bool:
        """Return whether this thread is within a filter."""
        return get_ident() in self._askers

    @property
    def filters(self) -> bool:
        """Return whether any route has a filter."""
        return bool(self._filtered())

    @property
    def stuck(self) -> bool:
        """Return whether a thread is in a filter that may never return, as another filter may."""
        return any(route.lane.hangs_in_filter for routes in self.routes.values() for route in routes)

    def left(self, inbox: deque[Item]) -> bool:
        """Return whether anything remains to be routed."""
        return bool(self.run or self.asking or self.waiting or inbox)

    def route_rest(self, inbox: deque[Item], until: float = inf) -> None:
        """Route what a blocked loop left, until a time by `monotonic`; safe from any thread."""
        self._ask()
        for item in self._rest(inbox):
            if isinstance(item, Event):
                self.route(item)
            else:
                self.drop(item)
            if monotonic() >= until:
                return

    def on_the_way(self, inbox: deque[Item]) -> Counter[Lane]:
        """Return how many events each queue without a filter will get of those a blocked loop left.

        Safe from any thread.
        """
        counts = Counter(
            route.lane
            for _, route, _ in _copy_of(self.asking)
            if route.passes is None and not route.lane.paused
        )
        routes, used = self.routes, self._in_use
        kinds: Counter[type[Event]] = Counter()  # counted together: there may be as many as the inbox holds
        for item in [*_copy_of(self.run), *_copy_of(self.waiting), *_copy_of(inbox)]:
            event = item.event if isinstance(item, Stamped) else item
            if isinstance(event, Event):
                kinds[type(event)] += 1
            elif isinstance(event, partial) and event.func == self._use and event.args[1] > used:
                _enter(kinds, routes, counts)
                routes, used = event.args  # from there on
        _enter(kinds, routes, counts)
        return counts

    def lose_rest(self, inbox: deque[Item]) -> None:
        """Count everything left as dropped, once queues take no more events; safe from any thread.

        Events that no filter is called for are counted by type: there may be as many as the inbox holds, and
        a close has a deadline.
        """
        while (entry := _next(self.asking)) is not None:
            charge(entry[0], entry[1], ask=self.asks)
        counts: Counter[type[Event]] = Counter()
        routes, asked = self.routes, self._filtered() if self.asks else set()
        for item in self._rest(inbox):
            if isinstance(item, Event) and type(item) not in asked:
                counts[type(item)] += 1
                continue
            _lose_counted(counts, routes)  # first: it may be a filter that never returns, or another table
            self.drop(item)
            if routes is not self.routes:
                routes, asked = self.routes, self._filtered() if self.asks else set()
        _lose_counted(counts, routes)

    def _filtered(self) -> set[type[Event]]:
        return {kind for kind, routes in self.routes.items() if any(r.passes is not None for r in routes)}

    def _rest(self, inbox: deque[Item]) -> Iterator[Item]:
        """Yield the items present now, and not what is emitted meanwhile, which may never end."""
        left = len(self.run) + len(self.waiting) + len(inbox)
        while left > 0 and (queue := self.run or self.waiting or inbox):
            left -= 1
            try:
                item: Item = queue.popleft()
            except IndexError:  # another thread may take them too
                continue
            yield item.event if isinstance(item, Stamped) else item

    def lose(self, event: Event, but: Lane | None = None) -> None:
        """Count an event as dropped for each of its subscribers except `but`; safe from any thread."""
        for route in self.routes.get(type(event), ()):
            if route.lane is not but:
                charge(event, route, ask=self.asks)

    def drop(self, item: Item, *, ask: bool = True) -> None:
        """Count an item as dropped for its subscribers, or make the call; safe from any thread.

        Without `ask`, filters are not called, and each subscriber with a filter counts a drop.
        """
        if isinstance(item, Stamped):
            item = item.event
        if isinstance(item, Event):
            for route in self.routes.get(type(item), ()):
                charge(item, route, ask=ask and self.asks)
        elif isinstance(item, Posted):
            events = _made_of(item)
            for event in events or ():
                self.drop(event, ask=ask)
            if events is None:
                self._lose(item)
        else:
            item()

    def _lose(self, posted: Posted) -> None:
        """Count one drop of each type for a deferred; how many events it would have made is unknown."""
        for lane in self.lanes_of(posted.types):
            lane.lose()


def _made_of(posted: Posted) -> list[Event] | None:
    """Return the events of a deferred, to be counted; None if its values are not ready, or it fails."""
    try:
        return [*posted.deferred.events()] if posted.deferred.ready() else None
    except (Exception, SystemExit):  # of foreign code, on a thread that emits or closes
        logger.exception("events could not be made: %r", posted.deferred)
        return None


def charge(event: Event, route: Route, *, ask: bool) -> bool:
    """Count an event as dropped by a subscriber; return False if the subscriber did not want it.

    Without `ask`, its filter is not called, and the event counts.
    """
    return not route.lane.paused and route.lane.lose(event, route.passes if ask else None)


def _enter(kinds: Counter[type[Event]], routes: Routes, counts: Counter[Lane]) -> None:
    for event_type, count in kinds.items():
        for route in routes.get(event_type, ()):
            if route.passes is None and not route.lane.paused:
                counts[route.lane] += count
    kinds.clear()


def _lose_counted(counts: Counter[type[Event]], routes: Routes) -> None:
    for event_type, count in counts.items():
        for route in routes.get(event_type, ()):
            if not route.lane.paused:
                route.lane.lose_many(event_type, count)
    counts.clear()


def _copy_of(items: deque[T]) -> list[T]:
    while True:
        with suppress(RuntimeError):  # somebody has emitted meanwhile
            return [*items]


def _next(items: deque[T]) -> T | None:
    """Remove and return the oldest item, None without any: a closing bus may take items, too."""
    try:
        return items.popleft()
    except IndexError:
        return None
