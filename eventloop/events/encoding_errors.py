"""Events that cannot be encoded: each costs itself alone, and is named.

    raise Unencodable([why_not(event, error, encode)], of=len(events))      # all the others were written

The lane counts these as failed and the rest of the delivery as delivered, logs each kind once, and goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from eventloop.events.base import Event, event_name
from eventloop.util.text import error_text


class BadEvent(NamedTuple):
    """One of them."""

    event: str
    """Its name."""
    field: str
    """The first field that cannot be encoded, and what it holds; nothing where that cannot be told."""
    why: str

    def __str__(self) -> str:
        of = f" for its field {self.field}" if self.field else ""
        return f"{self.event} cannot be encoded{of}: {self.why}"


class Unencodable(Exception):
    """Raised by a subscriber that has dealt with a delivery but for some of its events, which cannot be
    encoded.

    Args:
        of: how many events the delivery has. Raised for a part of it, as where a batch is written one by one,
            it is an error like any other: what became of the rest nobody knows.
    """

    def __init__(self, events: list[BadEvent], of: int) -> None:
        super().__init__(events, of)
        self.events, self.of = events, of

    def __str__(self) -> str:
        more = len(self.events) - 1
        return f"{self.events[0]}{f' (and {more} more)' if more else ''}"


def bad_events(error: BaseException, of: int) -> list[BadEvent]:
    """Those that alone have failed with an error of a delivery; none where all of it has."""
    return error.events if isinstance(error, Unencodable) and error.of == of else []


def why_not(event: Event, error: Exception, encode: Callable[[Any], object]) -> BadEvent:
    """What is wrong with an event of which `encode` raised `error`."""
    field = ""
    for name in event.__struct_fields__:
        try:
            encode(getattr(event, name))
        except Exception as of_field:
            field, error = f"{name}, a {_type_name(getattr(event, name))}", of_field
            break
    return BadEvent(event_name(type(event)), field, error_text(error))


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
