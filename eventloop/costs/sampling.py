"""Decide which events are clocked: all of them, except in a tight loop.

To clock a handler takes some 0.2 us. Where that is below 0.3 % of the time from one event to the next, each
event is clocked, so the times are exact; above 0.3 ms that is always so. So is an event that keeps a handler
busy now and then, even in one call of a hundred. In a tighter loop one event in `PERIOD` is clocked, and the
times of the calls between are estimated from it.
"""

from __future__ import annotations

from time import perf_counter

HANDLER_SECONDS = 70e-6
"""The time between two events for each handler above which all are clocked: 0.2 us are 0.3 % of it."""
ALWAYS_SECONDS = 0.3e-3
"""The time between two events above which all are clocked, however many handlers there are."""
WINDOW = 256
"""Clocked events over which the time between two events is averaged."""
PERIOD = 127
"""Of so many events in a tight loop one is clocked; a prime, so that a handler that works in every tenth or
hundredth event is seen as often as it works.
"""
PAUSES = 2
"""Periods in a row that must be slow to end the sampling, as one may contain a pause of the loop."""
STAMP_SECONDS = 0.01
"""Time between two events whose wait in the background queues is measured."""


class Sampling:
    """Choose the events of one type that are clocked, from the time between them.

        due = sampling.next_due(count, began := perf_counter())
        ...  # the event's handlers
        sampling.took(perf_counter() - began)

    Attributes:
        handlers: number of functions that each event calls.
        sampled: whether the event last asked about stands for events that were not clocked.
        stamps: whether the wait of that event in the queues is measured.
    """

    __slots__ = (
        "_at", "_count", "_longest", "_next", "_slow", "_stamped_at", "handlers", "sampled", "stamps",
    )  # fmt: skip

    def __init__(self) -> None:
        self.handlers = 0
        self.sampled = self.stamps = False
        self._next = False  # `sampled` at the next call
        self._count, self._at = 0, perf_counter()  # where the window, or the period, began
        self._longest = 0.0  # time in handlers of an event since then
        self._slow = 0
        self._stamped_at = float("-inf")

    def next_due(self, count: int, now: float) -> int:
        """Return the number of the next event to be clocked.

        Args:
            count: the number of this event, which is clocked.
            now: when it was emitted, by `perf_counter`.
        """
        self.sampled = self._next
        self.stamps = now - self._stamped_at >= STAMP_SECONDS
        if self.stamps:
            self._stamped_at = now
        if self.sampled or count - self._count >= WINDOW:
            self._decide(count - self._count, now - self._at)
            self._count, self._at, self._longest = count, now, 0.0
        return count + (PERIOD if self._next else 1)

    def took(self, seconds: float) -> None:
        """Note the seconds that all handlers of the event last asked about took together."""
        self._longest = max(self._longest, seconds)

    def _decide(self, events: int, seconds: float) -> None:
        enough = min(ALWAYS_SECONDS, self.handlers * HANDLER_SECONDS)
        self._slow = 0 if seconds < events * enough else self._slow + 1
        self._next = self._longest < enough and self._slow < (PAUSES if self._next else 1)
