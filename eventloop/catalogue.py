"""Names of events: which class a name means, and what a misspelled one was meant to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from eventloop.peer_names import point_meant

if TYPE_CHECKING:
    from eventloop.events import Event

ALIASES = {"before_step": "before_train_iter", "after_step": "after_train_iter"}
"""detectron2's and Pet's names of the train iteration pair."""

_BY_NAME: dict[str, list[type[Event]]] = {}


def event_name(event_type: type[Event]) -> str:
    """The snake_case name of an event class, which is also its tag when encoded."""
    return str(event_type.__struct_config__.tag)


def declare(name: str, event_type: type[Event]) -> None:
    """Make a class known under `name`. A class defined anew (a notebook cell run twice) replaces itself.

    Raises:
        ValueError: the name belongs to an event of eventloop itself, or stands for one.
    """
    if name in ALIASES:
        raise ValueError(
            f"class {event_type.__module__}.{event_type.__qualname__} declares the event {name!r}, "
            f"which is another name of {ALIASES[name]!r}: choose another class name"
        )
    known = _BY_NAME.setdefault(name, [])
    if any(other.__module__ == "eventloop.events" for other in known):
        raise ValueError(
            f"class {event_type.__module__}.{event_type.__qualname__} declares the event {name!r}, "
            "which is one of eventloop's own: choose another class name"
        )
    known[:] = [other for other in known if other.__module__ != event_type.__module__]
    known.append(event_type)


def find_event(event: str | type[Event]) -> type[Event]:
    """Resolve a name, an alias or a class to the event class.

    Raises:
        TypeError: `event` is neither a string nor an event class.
        ValueError: no event has that name (with a suggestion), or two modules declare it.
    """
    if isinstance(event, type) and hasattr(event, "background_born"):
        if event.__name__ == "Event" or event.__name__.startswith("_"):
            raise TypeError(
                f"{event.__name__} is a base class, never emitted: name an event, or '*' for all of them"
            )
        return event
    if not isinstance(event, str):
        raise TypeError(f"expected an event name or an Event subclass, got {event!r}")
    candidates = _BY_NAME.get(ALIASES.get(event, event), [])
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        modules = " and ".join(c.__module__ for c in candidates)
        raise ValueError(
            f"the event name {event!r} is declared by {modules}: subscribe with the class itself"
        )
    meant = point_meant(event)
    if meant in _BY_NAME:
        raise ValueError(f"unknown event {event!r}: here it is {meant!r}")
    raise ValueError(f"unknown event {event!r}{suggest(event, [*_BY_NAME, *ALIASES])}")


def several(events: str | type[Event] | Sequence[str | type[Event]]) -> tuple[str | type[Event], ...]:
    """One event or several, as several: a text is one name, and no sequence of letters.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(events, str | type):
        return (events,)
    try:
        return tuple(events)
    except TypeError:
        raise TypeError(f"expected an event, by name or class, or several of them, got {events!r}") from None


def declared_events() -> list[type[Event]]:
    """Every declared event class, in order of declaration."""
    return [event_type for known in _BY_NAME.values() for event_type in known]


def near(word: str, known: Iterable[str]) -> str:
    """The tail of an error message that has said what is known: the near name, if there is one."""
    found = get_close_matches(word, [*known], n=1)
    return f": did you mean {found[0]!r}?" if found else ""


def suggest(word: str, known: list[str]) -> str:
    """The tail of an error message: the near name if there is one, else where to look."""
    return near(word, known) or f": known are {', '.join(sorted(known))}"
