"""Define events that are created later, in the background."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

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
    events: list[Event] | None = None
    """The events that the subscriber wants; None until they are created."""


@dataclass(frozen=True, slots=True)
class Stamped:
    """An event whose wait in the queue is measured."""

    event: Event
    emitted: float
    """The time of the emit, by `perf_counter`."""
