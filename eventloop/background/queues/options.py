"""Define the options of a background subscriber: its queue, its overflow policy, batches and errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Overflow = Literal["spill", "drop_oldest", "drop_newest", "latest", "block"]
OnError = Literal["disable", "log", "raise"]
Offload = Literal["thread", "process"]


@dataclass(frozen=True, slots=True)
class SubscriberOptions:
    """The options of a background subscriber, explained and checked by `bus.subscribe`.

    `on_flush` and `on_close` are called on the subscriber's own thread, after all events emitted before.
    """

    queue: int = 1024
    overflow: Overflow = "spill"
    on_error: OnError = "disable"
    stall_timeout: float = 60.0
    batch: bool | int = False
    on_flush: Callable[[], object] | None = None
    on_close: Callable[[], object] | None = None
    linger: float = 0.0
    timed: bool = False

    @property
    def capacity(self) -> int:
        """Return the largest number of events that the queue may hold."""
        return 1 if self.overflow == "latest" else self.queue

    @property
    def most(self) -> int:
        """Return the largest number of events in a batch.

        It is `sys.maxsize` with `batch=True`, and 0 if events are delivered one by one.
        """
        return sys.maxsize if self.batch is True else int(self.batch)
