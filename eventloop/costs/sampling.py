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


class Sampling:
    """Choose the events of one type that are clocked, from the time between them.

        if count == due:
            due += sampling.update(count, perf_counter())
        elif not sampling.clocks_all:
            ...  # the event's handlers, not clocked
            return
        began = perf_counter()
        ...  # the event's handlers
        sampling.durations.append(perf_counter() - began)

    Attributes:
        handlers: the number of functions that each event calls.
        sampled: whether the event of the last `update` also stands for earlier events that were not clocked.
        clocks_all: whether all events up to the next `update` are clocked, or none of them.
        durations: the seconds that all handlers of one clocked event took together, for each since the last
            decision.
    """

    __slots__ = (
        "_at",
        "_count",
        "_period",
        "_slow",
        "clocks_all",
        "durations",
        "handlers",
        "sampled",
    )

    def __init__(self) -> None:
        self.handlers = 0
        self.sampled = False
        self.clocks_all = True
        self.durations: list[float] = []
        self._period = 1  # events from a clocked one to the next
        self._count, self._at = 0, perf_counter()  # number and time of the event at the last decision
        self._slow = False  # whether events were rare in the last period; a single pause looks like that

    def update(self, count: int, now: float) -> int:
        """Return the number of events from this one, which is clocked, to the next `update`.

        Args:
            count: the number of this event.
            now: the time of its emit, by `perf_counter`.
        """
        self.sampled = self._period > 1
        if self.sampled or count - self._count >= WINDOW:
            self._decide(count - self._count, now - self._at)
            self._count, self._at = count, now
            self.durations.clear()
        self.clocks_all = self._period == 1 and not self.sampled
        return self._count + WINDOW - count if self.clocks_all else self._period

    def _decide(self, events: int, seconds: float) -> None:
        """Set the sampling period for the next events.

        Args:
            events: the number of events since the last decision.
            seconds: the time since the last decision, in handlers and outside of them.
        """
        enough = min(ALWAYS_SECONDS, max(1, self.handlers) * HANDLER_SECONDS)
        slow = seconds >= events * enough
        longest = max(self.durations, default=0.0)
        if longest >= enough or (slow and (self._slow or self._period == 1)):
            self._period = 1
        elif not slow:
            tight = RARITY * enough * events / seconds if seconds > 0 else PERIODS[-1]
            self._period = max([p for p in PERIODS if p <= tight], default=PERIODS[0])
        self._slow = slow
