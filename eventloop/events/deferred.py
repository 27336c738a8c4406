"""Define events that are created later, in the background."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from eventloop.events.base import Event


class Deferred(Protocol):
    """Events that can only be created once a value has left the device.

    It is posted with `Bus.post`. The keeper calls `events` in the background when `ready` returns True, in
    the order of the posts.
    """

    def ready(self) -> bool:
        """Return whether `events` returns without waiting."""

    def events(self) -> Iterable[Event]:
        """Create the events. Called once, on the background loop."""


@dataclass(eq=False, slots=True)
class Pending:
    """The place of deferred events in the queue of one subscriber."""

    types: tuple[type[Event], ...]
    events: list[Event] | None = None
    """Those that the subscriber wants, once they are created."""


@dataclass(frozen=True, slots=True)
class Stamped:
    """An event whose wait in the queue is measured."""

    event: Event
    emitted: float
    """Time of the emit, by `perf_counter`."""
