"""Decide which events are clocked: all of them, except in a tight loop.

To clock a handler takes some 0.2 us. Where that is below 0.3 % of the time from one event to the next, each
event is clocked, so the times are exact; above 0.3 ms that is always so. So is an event that keeps a handler
busy now and then, even in one call of a hundred. In a tighter loop some events are clocked, the fewer the
tighter it is, and the times of the calls between are estimated from them.
"""

from __future__ import annotations

from time import perf_counter

HANDLER_SECONDS = 70e-6
"""The time between two events for each handler above which all are clocked: 0.2 us are 0.3 % of it."""
ALWAYS_SECONDS = 0.3e-3
"""The time between two events above which all are clocked, however many handlers there are."""
WINDOW = 256
"""Clocked events over which the time between two events is averaged."""
PERIODS = (3, 7, 17, 37, 79, 163, 251)
"""Of so many events in a tight loop one is clocked. They are primes, so that a handler that works in every
tenth or hundredth event is seen as often as it works.
"""
RARITY = 4
"""How many times rarer the clocked events of a tight loop are than their share of the time allows."""
STAMP_SECONDS = 0.01
"""Time between two events whose wait in the background queues is measured."""


class Sampling:
    """Choose the events of one type that are clocked, from the time between them.

        period = sampling.period(count, began := perf_counter())
        ...  # the event's handlers
        sampling.took(perf_counter() - began)

    Attributes:
        handlers: number of functions that each event calls.
        sampled: whether events were left out before the last clocked one, which stands for them.
        stamps: whether the wait of the last clocked event in the queues is to be measured.
    """

    __slots__ = (
        "_at", "_count", "_longest", "_period", "_slow", "_stamped_at", "handlers", "sampled", "stamps",
    )  # fmt: skip

    def __init__(self) -> None:
        self.handlers = 0
        self.sampled = self.stamps = False
        self._period = 1  # events from a clocked one to the next
        self._count, self._at = 0, perf_counter()  # where the window, or the period, began
        self._longest = 0.0  # time in handlers of an event since then
        self._slow = False  # whether the last period was, which may only have contained a pause
        self._stamped_at = float("-inf")

    def period(self, count: int, now: float) -> int:
        """Return how many events later the next one is clocked.

        Args:
            count: the number of this event, which is clocked.
            now: when it was emitted, by `perf_counter`.
        """
        self.sampled = self._period > 1
        self.stamps = now - self._stamped_at >= STAMP_SECONDS
        if self.stamps:
            self._stamped_at = now
        if self.sampled or count - self._count >= WINDOW:
            self._decide(count - self._count, now - self._at)
            self._count, self._at, self._longest = count, now, 0.0
        return self._period

    def took(self, seconds: float) -> None:
        """Note how many seconds all handlers of the last clocked event took together."""
        self._longest = max(self._longest, seconds)

    def _decide(self, events: int, seconds: float) -> None:
        """Decide how many events to leave out from now on.

        Args:
            events: the number of events since the last decision.
            seconds: the time that has passed since, in handlers and outside of them.
        """
        enough = min(ALWAYS_SECONDS, max(1, self.handlers) * HANDLER_SECONDS)
        slow = seconds >= events * enough
        if self._longest >= enough or (slow and (self._slow or self._period == 1)):
            self._period = 1
        elif not slow:
            tight = RARITY * enough * events / seconds if seconds > 0 else PERIODS[-1]
            self._period = max([p for p in PERIODS if p <= tight], default=PERIODS[0])
        self._slow = slow
