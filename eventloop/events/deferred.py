"""Define events that are created later, in the background, and events that have the time of their emit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter, time
from typing import NamedTuple, Protocol

import msgspec

from eventloop.events.base import Event


class Deferred(Protocol):
    """Events that can only be created once a value has left the device.

    The object is posted with `Bus.post`. In the background the keeper waits until `ready` returns True, and
    then calls `events`, in the order of the posts.
    """

    def ready(self) -> bool:
        """Return whether `events` would return without waiting."""

    def events(self) -> Iterable[Event]:
        """Create the events. Called once, on the keeper's thread."""


@dataclass(eq=False, slots=True)
class Pending:
    """A placeholder for deferred events in the queue of one subscriber."""

    types: tuple[type[Event], ...]
    events: list[Queued] | None = None
    """The events that the subscriber wants; None until they are created."""


class Stamped(msgspec.Struct, frozen=True, gc=False):
    """An event in a queue with the time of its emit."""

    event: Event
    emitted: float
    """The time of the emit, by `perf_counter`."""


Queued = Event | Stamped


class Timed(NamedTuple):
    """An event with the Unix time of its emit, in seconds."""

    time: float
    event: Event


def unstamped(item: Queued) -> Event:
    return item.event if isinstance(item, Stamped) else item


def timed(items: Iterable[Queued]) -> list[Timed]:
    """Return the events with their times; one without a time, because it was spilled, gets the present."""
    now, present = perf_counter(), time()
    return [
        Timed(present - now + item.emitted, item.event) if isinstance(item, Stamped) else Timed(present, item)
        for item in items
    ]
