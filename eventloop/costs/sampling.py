"""Choose which events are clocked (measured): all of them, except in a tight loop.

Clocking a handler takes some 0.2 us. All events are clocked if that is below 0.3 % of the time from one event
to the next, so that the times are exact; this is always so above 0.3 ms between events. All are clocked, too,
if their handlers take long now and then, even in one call of a hundred. In a tighter loop only some events
are clocked, the fewer the tighter the loop is, and the times of the other calls are estimated from them.
"""

from __future__ import annotations

from time import perf_counter

HANDLER_SECONDS = 70e-6
"""The time between two events, for each handler, above which all are clocked: 0.2 us is 0.3 % of it."""
ALWAYS_SECONDS = 0.3e-3
"""The time between two events above which all events are clocked, whatever the number of handlers."""
WINDOW = 256
"""The number of clocked events over which the time between events is averaged."""
PERIODS = (3, 7, 17, 37, 79, 163, 251)
"""The possible sampling periods: one of so many events is clocked in a tight loop.

They are primes, so that a handler that works in every tenth or hundredth event is clocked in a fair share of
the events in which it works.
"""
RARITY = 4
"""The factor by which fewer events are sampled in a tight loop than the limit of 0.3 % would allow."""
STAMP_SECONDS = 0.01
"""The least time between two events whose wait in the background queues is measured."""


class Sampling:
    """Choose the events of one type that are clocked, from the time between them.

        period = sampling.period(count, began := perf_counter())
        ...  # the event's handlers
        sampling.took(perf_counter() - began)

    Attributes:
        handlers: the number of functions that each event calls.
        sampled: whether the last clocked event also stands for events before it that were not clocked.
        stamps: whether the wait of the last clocked event in the queues is to be measured.
    """

    __slots__ = (
        "_at", "_count", "_longest", "_period", "_slow", "_stamped_at", "handlers", "sampled", "stamps",
    )  # fmt: skip

    def __init__(self) -> None:
        self.handlers = 0
        self.sampled = self.stamps = False
        self._period = 1  # events from a clocked one to the next
        self._count, self._at = 0, perf_counter()  # number and time of the event at the last decision
        self._longest = 0.0  # the longest time in the handlers of one event since the last decision
        self._slow = False  # whether events were rare in the last period; a single pause looks like that
        self._stamped_at = float("-inf")

    def period(self, count: int, now: float) -> int:
        """Return the number of events from this one to the next event that is clocked (measured).

        Args:
            count: the number of this event, which is clocked.
            now: the time of its emit, by `perf_counter`.
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
        """Note the seconds that all handlers of the last clocked event took together."""
        self._longest = max(self._longest, seconds)

    def _decide(self, events: int, seconds: float) -> None:
        """Set the sampling period for the next events.

        Args:
            events: the number of events since the last decision.
            seconds: the time since the last decision, in handlers and outside of them.
        """
        enough = min(ALWAYS_SECONDS, max(1, self.handlers) * HANDLER_SECONDS)
        slow = seconds >= events * enough
        if self._longest >= enough or (slow and (self._slow or self._period == 1)):
            self._period = 1
        elif not slow:
            tight = RARITY * enough * events / seconds if seconds > 0 else PERIODS[-1]
            self._period = max([p for p in PERIODS if p <= tight], default=PERIODS[0])
        self._slow = slow
