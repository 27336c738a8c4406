"""Define events that are created later, in the background."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from eventloop.events.base import Event


class Deferred(Protocol):
    """Events that can only be created once a value has left the device.

    An object with a true attribute `prompt` never waits once it is ready, and never hangs. Events that were
    emitted earlier are then handed over together with its events, and not before.
    """

    def ready(self) -> bool:
        """Return whether `events` returns without waiting."""

    def events(self) -> Iterable[Event]:
        """Create the events. Called once, on the background loop."""


class Posted(NamedTuple):
    """A deferred in the inbox, and the types of its events if known."""

    deferred: Deferred
    types: tuple[type[Event], ...]
    emitted: float = 0.0
    """Time of the post, by `perf_counter`."""


@dataclass(frozen=True, slots=True)
class Stamped:
    """An event in the inbox whose wait is measured."""

    event: Event
    emitted: float
