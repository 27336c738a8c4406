"""Find event classes by name, and suggest a name for a misspelled one.

The bus and the readers of event logs use this.
"""

from __future__ import annotations

from collections.abc import Sequence

from eventloop.events.base import ALIASES, Event, known_events
from eventloop.migration.names import point_meant
from eventloop.util.suggest import suggest


def find_event(event: str | type[Event]) -> type[Event]:
    """Return the event class for a name, an alias or a class.

    Raises:
        TypeError: `event` is neither a name nor an event class, or is a base class of events.
        ValueError: no event has this name, or several modules declare one.
    """
    if isinstance(event, type) and hasattr(event, "background_born"):
        if event.__name__ == "Event" or event.__name__.startswith("_"):
            raise TypeError(
                f"{event.__name__} is a base class and never emitted: pass an event, or '*' for all events"
            )
        return event
    if not isinstance(event, str):
        raise TypeError(f"expected an event name or an Event subclass, got {event!r}")
    candidates = known_events().get(ALIASES.get(event, event), [])
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        modules = " and ".join(candidate.__module__ for candidate in candidates)
        raise ValueError(f"the event name {event!r} is declared by {modules}: pass the class itself")
    meant = point_meant(event)
    if meant in known_events():
        raise ValueError(f"unknown event {event!r}: use {meant!r}")
    raise ValueError(f"unknown event {event!r}{suggest(event, [*known_events(), *ALIASES])}")


def several(events: str | type[Event] | Sequence[str | type[Event]]) -> tuple[str | type[Event], ...]:
    """Return the given event or events as a tuple; a str is the name of one event."""
    if isinstance(events, str | type):
        return (events,)
    try:
        return tuple(events)
    except TypeError:
        raise TypeError(f"expected an event, by name or class, or a list of events, got {events!r}") from None


def declared_events() -> list[type[Event]]:
    """Return every declared event class, in order of declaration."""
    return [event_type for classes in known_events().values() for event_type in classes]
