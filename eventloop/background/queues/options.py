"""How a background subscriber is fed; the words are those of `bus.on`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Overflow = Literal["spill", "drop_oldest", "drop_newest", "latest", "block"]
OnError = Literal["disable", "log", "raise"]
Offload = Literal["thread", "process"]


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """Checked by `bus.subscribe`, which says what each of them means.

    `on_flush` and `on_close` are called on the subscriber's own thread, after what was emitted before.
    """

    queue: int = 1024
    overflow: Overflow = "spill"
    on_error: OnError = "disable"
    stall_timeout: float = 60.0
    batch: bool | int = False
    on_flush: Callable[[], object] | None = None
    on_close: Callable[[], object] | None = None

    @property
    def capacity(self) -> int:
        """How many events may wait."""
        return 1 if self.overflow == "latest" else self.queue

    @property
    def most(self) -> int:
        """How many events a batch may have, as many as wait with `batch=True`; 0 where they are delivered one by one."""
        return sys.maxsize if self.batch is True else int(self.batch)
