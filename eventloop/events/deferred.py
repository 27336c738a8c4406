"""Events that are promised now and made later, on the background side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from eventloop.events.base import Event


class Deferred(Protocol):
    """Events that can only be made later, when a value has left the device.

    One with an attribute `prompt` that is true waits for nothing once it is ready, and never hangs: what was
    emitted before it need not be handed over first, and goes with its events.
    """

    def ready(self) -> bool:
        """True when `events` will not wait."""

    def events(self) -> Iterable[Event]:
        """Make the events; called once, on the background loop."""


class Posted(NamedTuple):
    """A deferred in the inbox, and the types of what it will make, where they are known."""

    deferred: Deferred
    types: tuple[type[Event], ...]
    emitted: float = 0.0
    """When it was posted, by `perf_counter`."""


@dataclass(frozen=True, slots=True)
class Stamped:
    """An event in the inbox whose wait is to be measured."""

    event: Event
    emitted: float
