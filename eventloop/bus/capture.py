"""Collect the events of a block in a list. `Bus.capture` uses this, mostly in tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from eventloop.bus.subscription import Subscription
from eventloop.events import Event
from eventloop.events.catalogue import find_event
from eventloop.events.priority import Priority


@contextmanager
def capture(
    subscribe: Callable[..., Subscription], flush: Callable[[], object], events: tuple[str | type[Event], ...]
) -> Iterator[list[Event]]:
    """Collect events within the block; events created in the background are added when it ends.

    Args:
        subscribe, flush: methods of the bus.
        events: names, classes or "*", at least one.
    """
    seen: list[Event] = []
    types = [e if e == "*" else find_event(e) for e in events]
    sync = [t for t in types if isinstance(t, str) or not t.background_born]
    born = [t for t in types if not isinstance(t, str) and t.background_born]
    with ExitStack() as subscriptions:
        if sync or not born:
            subscriptions.enter_context(subscribe(seen.append, *sync, priority=Priority.LOWEST))
        if born:
            subscriptions.enter_context(subscribe(seen.append, *born, offload="thread", overflow="block"))
            subscriptions.callback(flush)
        yield seen
