"""Check the events that a handler subscribes to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from eventloop.events.base import Event, event_name
from eventloop.events.catalogue import find_event


def subscribed_types(
    name: str, events: tuple[str | type[Event], ...], *, background: bool
) -> tuple[bool, tuple[type[Event], ...]]:
    """Return whether a subscriber receives all events, and if not, the types of its events.

    Args:
        name: the subscriber's name, for errors.
        events: the events that were named in the subscription; "*" stands for all.
        background: whether the subscriber runs in the background.

    Raises:
        TypeError: no event is named, or a sync handler names an event that is created in the background.
        ValueError: an event is unknown.
    """
    if not events:
        raise TypeError(f"{name} subscribes to no event: name at least one, or '*' for all")
    types = tuple(dict.fromkeys(find_event(event) for event in events if event != "*"))
    for event_type in types:
        if event_type.background_born and not background:
            raise TypeError(
                f"{name} is a sync handler, but {event_name(event_type)} is created in the background, later "
                "than the iteration that it reports: read trainer.metrics instead, or subscribe a coroutine "
                "function"
            )
    wildcard = "*" in events
    return wildcard, () if wildcard else types


def check_possible(name: str, types: Iterable[type[Event]], excluded: Mapping[type[Event], str]) -> None:
    """Refuse a subscription to events that are never emitted on this bus.

    Args:
        name: the subscriber's name, for the error.
        types: the event types of the subscription.
        excluded: the types of the events that are never emitted, each with the reason.

    Raises:
        ValueError: `types` contains an excluded type.
    """
    for event_type in types:
        if (reason := excluded.get(event_type)) is not None:
            raise ValueError(
                f"{name} subscribes to {event_name(event_type)}, which this bus never has: {reason}"
            )
