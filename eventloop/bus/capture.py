"""Collect the events that are emitted within a `with` block, for `Bus.capture`, which tests use."""

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
    """Collect the events emitted within the block in a list; add events of the background when it ends.

    Args:
        subscribe, flush: methods of the bus.
        events: names, classes or "*", at least one.
    """
    collected: list[Event] = []
    types = [event if event == "*" else find_event(event) for event in events]
    background = [each for each in types if not isinstance(each, str) and each.background_born]
    sync = [each for each in types if each not in background]
    with ExitStack() as subscriptions:
        if sync or not background:
            subscriptions.enter_context(subscribe(collected.append, *sync, priority=Priority.LOWEST))
        if background:
            subscriptions.enter_context(
                subscribe(collected.append, *background, offload="thread", overflow="block")
            )
            subscriptions.callback(flush)
        yield collected
