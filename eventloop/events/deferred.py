"""Define objects that create events later, in the background, and events with the time of their emit."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter, time
from typing import NamedTuple, Protocol

import msgspec

from eventloop.events.base import Event


class Deferred(Protocol):
    """An object that creates events from values that are still being copied from a device.

    A program passes it to `Bus.post`. The bus's background thread waits until `ready` returns True, and then
    calls `events`, in the order in which the objects were posted.
    """

    def ready(self) -> bool:
        """Return whether the values have arrived, so that `events` need not wait."""

    def events(self) -> Iterable[Event]:
        """Create the events. The bus's background thread calls this once."""


class Pending(msgspec.Struct, eq=False):
    """A placeholder in the queue of one subscriber for events that a `Deferred` object will create."""

    types: tuple[type[Event], ...]
    events: list[Queued] | None = None
    """The events that pass the subscriber's filters; None until they are created."""


class Stamped(msgspec.Struct, frozen=True, gc=False):
    """A queued event with the time of its emit."""

    event: Event
    emitted: float
    """The time of the emit in seconds, by `perf_counter`."""


Queued = Event | Stamped


class Timed(NamedTuple):
    """An event with the Unix time of its emit, in seconds."""

    time: float
    event: Event


def unstamped(item: Queued) -> Event:
    """Return the event of a queue's item, without its time."""
    return item.event if isinstance(item, Stamped) else item


def timed(items: Iterable[Stamped]) -> list[Timed]:
    """Return each event with the Unix time of its emit."""
    epoch = time() - perf_counter()  # the Unix time at which `perf_counter` was 0
    return [Timed(epoch + item.emitted, item.event) for item in items]
