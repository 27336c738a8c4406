"""Define the options of a background subscriber: its queue, its overflow policy, batches and errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal, get_args

import msgspec

from eventloop.util.checks import at_least, check_bools, check_choice, check_seconds

Overflow = Literal["spill", "drop_oldest", "drop_newest", "latest", "block"]
OnError = Literal["disable", "log", "raise"]
Offload = Literal["thread", "process"]


class SubscriberOptions(msgspec.Struct, frozen=True):
    """The options of a background subscriber; `Bus.subscribe` explains them.

    `on_flush` and `on_close` are called on the subscriber's own thread, after the delivery of all events that
    were emitted before the flush or close.
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

        `sys.maxsize` stands for `batch=True`, and 0 for a delivery of single events.
        """
        return sys.maxsize if self.batch is True else int(self.batch)

    def check(self) -> None:
        """Check the options.

        Raises:
            TypeError, ValueError: an option is invalid.
        """
        at_least("queue", self.queue, 1)
        check_choice("overflow", self.overflow, get_args(Overflow))
        check_choice("on_error", self.on_error, get_args(OnError))
        check_seconds("stall_timeout", self.stall_timeout, zero=False)
        check_seconds("linger", self.linger, zero=True)
        if not isinstance(self.batch, int):
            raise TypeError(f"batch must be True, False or a number of events, got {self.batch!r}")
        if self.batch is not False and self.batch < 1:
            raise ValueError(f"batch must be at least 1 event, got {self.batch}")
        check_bools(timed=self.timed)
        if self.timed and not self.batch:
            raise ValueError(
                "timed=True delivers lists, and needs batch: pass batch=True, or a number of events"
            )

    def changed(self) -> list[str]:
        """Return the names of the options that differ from their defaults."""
        default = SubscriberOptions()
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(default, name)]
