"""Define events that are created later, in the background, and events with the time of their emit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter, time
from typing import NamedTuple, Protocol

import msgspec

from eventloop.events.base import Event


class Deferred(Protocol):
    """Events that need a value that is still being copied from a device.

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
    """A queued event with the time of its emit."""

    event: Event
    emitted: float
    """The time of the emit, by `perf_counter`."""


Queued = Event | Stamped


class Timed(NamedTuple):
    """An event with the Unix time of its emit, in seconds."""

    time: float
    event: Event


def unstamped(item: Queued) -> Event:
    """Return the event without its time."""
    return item.event if isinstance(item, Stamped) else item


def timed(items: Iterable[Stamped]) -> list[Timed]:
    """Return each event with the Unix time of its emit."""
    epoch = time() - perf_counter()
    return [Timed(epoch + item.emitted, item.event) for item in items]
