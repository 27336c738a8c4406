"""Report events that cannot be encoded, or that a server refuses, so that only these events fail.

    raise Unencodable([why_not(event, error, encode)], of=len(events))      # all the others were written

Writers raise this error. The queue counts these events as failed and the rest of the delivery as delivered,
logs each kind once, and continues.
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
    reported: bool = False
    """Whether the subscriber has logged it already, so that no other line names it."""

    def __str__(self) -> str:
        of = f" for its field {self.field}" if self.field else ""
        what = "failed" if self.reported else "cannot be encoded"
        return f"{self.event} {what}{of}: {self.why}"


class Unencodable(Exception):
    """Raised by a subscriber that has written a delivery except for some events that cannot be encoded.

    Args:
        events: the events that failed.
        of: the number of events that the subscriber has tried. If it is less than the delivery, the whole
            delivery has failed, because the rest may not be written.
    """

    def __init__(self, events: list[BadEvent], of: int) -> None:
        super().__init__(events, of)
        self.events, self.of = events, of

    def __str__(self) -> str:
        more = len(self.events) - 1
        return f"{self.events[0]}{f' (and {more} more)' if more else ''}"


class NotTaken(Unencodable):
    """Raised by a subscriber for events that a service has not taken, while the others were delivered."""


def logged_itself(error: BaseException) -> bool:
    """Return whether the subscriber that has raised an error has logged all of it already."""
    return isinstance(error, Unencodable) and all(bad.reported for bad in error.events)


def bad_events(error: BaseException, of: int) -> list[BadEvent]:
    """Return the events that failed; [] if the whole delivery of `of` events failed."""
    return error.events if isinstance(error, Unencodable) and error.of == of else []


def why_not(event: Event, error: BaseException, encode: Callable[[Any], object]) -> BadEvent:
    """Find the field of an event for which `encode` raised `error`."""
    field = ""
    for name in event.__struct_fields__:
        try:
            encode(getattr(event, name))
        except (Exception, type(error)) as of_field:
            field, error = f"{name}, a {_type_name(getattr(event, name))}", of_field
            break
    return BadEvent(event_name(type(event)), field, error_text(error))


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
