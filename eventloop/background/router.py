"""Who is given which events, on the background loop's thread."""

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
"""What is handed over: an event, one whose wait is measured, one that is made later, or a call in its turn."""
Routes = dict[type[Event], tuple[Route, ...]]


RUN = 64
"""Events that are routed together, at most."""


class Router:
    """Puts events into the lanes of their subscribers, in the order of the emits.

    Events that are there together make a run: a lane takes all of its own at once, at a fifth of the time. Before
    foreign code is asked, a filter or a deferred that may take its time, what came before it has been handed over.

    A bus that closes at its deadline takes what is left in `run`, `asking` and `waiting` from another thread.

    Args:
        latest: where the last event of each type that is born in the background is kept.
    """

    def __init__(self, latest: dict[type[Event], Event]) -> None:
        self.routes: Routes = {}
        """By event; replaced as a whole, so that nobody sees half of it."""
        self.run: deque[Event] = deque()
        """Events that are about to be routed."""
        self.asking: deque[tuple[Event, Route, float]] = deque()
        """Who is still to be asked about the event under way, or given one that may have to wait for a disk, with its
        `emitted`."""
        self.waiting: deque[Item] = deque()
        """Events whose values are still on their way, and all that came after them."""
        self._askers: list[int] = []  # the threads that are in a filter
        self._published = self._in_use = 0  # routing tables, by number
        self.asks = True
        """False at the end of a close: filters are asked no more, and all who have one are charged instead."""
        self._latest = latest
        self._read = 0  # deferreds whose events were made

    def publish(self, routes: Routes) -> Callable[[], None]:
        """What puts this table to use, when it is called: at once, or in its turn behind events that were emitted before.
        One that was overtaken by a newer does nothing, as none does after `close`."""
        self._published += 1
        return partial(self._use, routes, self._published)

    def _use(self, routes: Routes, number: int) -> None:
        if number > self._in_use:
            self.routes, self._in_use = routes, number

    @property
    def coming(self) -> bool:
        """True while a table waits for its turn, which may have filters that this one has not."""
        return self._in_use < self._published

    def close(self) -> None:
        """Let go of everybody."""
        self._use({}, sys.maxsize)

    def lanes_of(self, types: Iterable[type[Event]]) -> Iterator[Lane]:
        """The lanes of those who subscribed to any of the events; any thread."""
        return (route.lane for event_type in types for route in self.routes.get(event_type, ()))

    def take(self) -> None:
        """Move what waits to the run, up to something whose values are not there yet; a call, as the mark of
        `route_now`, waits for all before it."""
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
        """Add the events of a deferred that is ready to the run; one that fails is dropped, and holds nobody up.

        Like the deliveries, the waits of the first and of one in some are measured."""
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
        """Route the run: as `route` does with each event, in their order."""
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
        """Put an event into the queue of everyone who subscribed to it; `emitted` is when that was, for one whose wait
        is to be measured."""
        if event.background_born:
            self._latest[type(event)] = event
        routes = [route for route in self.routes.get(type(event), ()) if route.lane is not but]
        self.asking.extend((event, route, emitted) for route in routes if route.passes is None)
        self.asking.extend((event, route, emitted) for route in routes if route.passes is not None)
        self._ask()

    def _ask(self) -> None:
        """Come last those with filters: who has none gets the event also where a filter never returns."""
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
        """True in a filter that is asked about an event on its way."""
        return get_ident() in self._askers

    @property
    def filters(self) -> bool:
        """True when anybody has one."""
        return bool(self._filtered())

    @property
    def stuck(self) -> bool:
        """True when a thread is in a filter that may never return: another thread's may as little."""
        return any(route.lane.hangs_in_filter for routes in self.routes.values() for route in routes)

    def left(self, inbox: deque[Item]) -> bool:
        """True when there is something to route."""
        return bool(self.run or self.asking or self.waiting or inbox)

    def route_rest(self, inbox: deque[Item], until: float = inf) -> None:
        """Route what a loop that is held leaves, up to a time by `monotonic`; any thread."""
        self._ask()
        for item in self._rest(inbox):
            if isinstance(item, Event):
                self.route(item)
            else:
                self.drop(item)
            if monotonic() >= until:
                return

    def on_the_way(self, inbox: deque[Item]) -> Counter[Lane]:
        """How many events each lane will be given that has no filter to ask; of a loop that is held, from any thread."""
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
        """Charge everybody with what is left once nobody takes anything any more; any thread. Where no filter is asked
        events are counted together: there may be as many as the inbox holds, and who closes has a deadline."""
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
        """What there is now; not what is emitted meanwhile, which may never end."""
        left = len(self.run) + len(self.waiting) + len(inbox)
        while left > 0 and (queue := self.run or self.waiting or inbox):
            left -= 1
            try:
                item: Item = queue.popleft()
            except IndexError:  # another thread may take them too
                continue
            yield item.event if isinstance(item, Stamped) else item

    def lose(self, event: Event, but: Lane | None = None) -> None:
        """Charge everyone who would have been given an event; any thread."""
        for route in self.routes.get(type(event), ()):
            if route.lane is not but:
                charge(event, route, ask=self.asks)

    def drop(self, item: Item, *, ask: bool = True) -> None:
        """Charge those who would have been given it, or make the call; any thread. Without `ask` all who have a filter
        are charged, and it is not asked."""
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
        """How many events it would have become nobody knows: one of a type."""
        for lane in self.lanes_of(posted.types):
            lane.lose()


def _made_of(posted: Posted) -> list[Event] | None:
    """What a deferred becomes, so that it can be counted; None where its values are not there, or it fails."""
    try:
        return [*posted.deferred.events()] if posted.deferred.ready() else None
    except (Exception, SystemExit):  # of foreign code, on a thread that emits or closes
        logger.exception("events could not be made: %r", posted.deferred)
        return None


def charge(event: Event, route: Route, *, ask: bool) -> bool:
    """Count an event that a subscriber is not given as dropped; False where it did not want it. Without `ask` its filter
    is not asked whether it did."""
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
    """The oldest, None where there is none: a closing bus may take them too."""
    try:
        return items.popleft()
    except IndexError:
        return None
