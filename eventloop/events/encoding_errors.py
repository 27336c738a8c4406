"""Define the error by which a writer reports that only some events of a delivery have failed.

    raise Unencodable([why_not(event, error, encode)], of=len(events))      # all the others were written

The events could not be encoded, or a server refused them. The writer's queue counts them as failed and the
others as delivered, logs each kind once, and continues.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from eventloop.events.base import Event, event_name
from eventloop.util.text import error_text


class BadEvent(NamedTuple):
    """An event that cannot be encoded, or that a server refuses."""

    event: str
    """The name of the event."""
    field: str
    """The first field that cannot be encoded, and the type of its value; "" if unknown."""
    why: str
    """The error as text."""
    reported: bool = False
    """Whether the subscriber has logged the failure itself, so that nothing else logs it."""

    def __str__(self) -> str:
        field = f" for its field {self.field}" if self.field else ""
        failure = "failed" if self.reported else "cannot be encoded"
        return f"{self.event} {failure}{field}: {self.why}"


class Unencodable(Exception):
    """Raised by a subscriber that has written all events of a delivery except some that cannot be encoded.

    Args:
        events: the events that failed.
        of: the number of events that the subscriber has tried. If the delivery has more events, all of it
            counts as failed, because the subscriber has not tried the others.
    """

    def __init__(self, events: list[BadEvent], of: int) -> None:
        super().__init__(events, of)
        self.events, self.of = events, of

    def __str__(self) -> str:
        others = len(self.events) - 1
        return f"{self.events[0]}{f' (and {others} more)' if others else ''}"


class NotTaken(Unencodable):
    """Raised by a subscriber if a service has refused some events of a delivery and accepted the others."""


def logged_itself(error: BaseException) -> bool:
    """Return whether `error` reports only events whose failure the subscriber has logged itself."""
    return isinstance(error, Unencodable) and all(bad.reported for bad in error.events)


def bad_events(error: BaseException, of: int) -> list[BadEvent]:
    """Return the events that failed in a delivery of `of` events; [] if all of them failed."""
    return error.events if isinstance(error, Unencodable) and error.of == of else []


def why_not(event: Event, error: BaseException, encode: Callable[[Any], object]) -> BadEvent:
    """Return a record of an event that `encode` could not encode, with the first field that it cannot encode.

    Args:
        error: the error that `encode` raised for the event.
    """
    field = ""
    for name in event.__struct_fields__:
        try:
            encode(getattr(event, name))
        except (Exception, type(error)) as field_error:
            field, error = f"{name}, a {_type_name(getattr(event, name))}", field_error
            break
    return BadEvent(event_name(type(event)), field, error_text(error))


def _type_name(value: object) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
