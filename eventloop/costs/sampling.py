"""Choose the events whose handlers are clocked, that is measured: all events, except in a tight loop.

Clocking a handler takes some 0.2 us. All events are clocked if this is below 0.3 % of the time from one event
to the next, so that the times are exact. All are clocked as well if more than 0.3 ms pass between events, or
if the handlers of one event take that long now and then. In a tighter loop only some events are clocked, the
fewer the tighter the loop is, and the times of the other calls are estimated from them.
"""

from __future__ import annotations

from time import perf_counter

HANDLER_SECONDS = 70e-6
"""The time between two events, divided by the number of handlers, above which all events are clocked.

Clocking one handler, which takes 0.2 us, is 0.3 % of it.
"""
ALWAYS_SECONDS = 0.3e-3
"""The time between two events above which all events are clocked, whatever the number of handlers."""
WINDOW = 256
"""The number of events over which the time between events is averaged while all are clocked."""
PERIODS = (3, 7, 17, 37, 79, 163, 251)
"""The possible sampling periods: in a tight loop one event of a period is clocked.

They are primes, so that of the calls of a handler that works at every tenth or hundredth event a fair share
is clocked.
"""
RARITY = 4
"""The factor by which fewer events are clocked in a tight loop than the limit of 0.3 % would allow."""


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
        clocks_all: whether all events up to the next `update` are clocked; if False, none of them is.
        durations: for each clocked event since the last change of the period, the seconds that all its
            handlers took together.
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
        self._period = 1  # the number of events from a clocked one to the next
        # the number and the time of the event at the last call of `_decide`
        self._count, self._at = 0, perf_counter()
        self._slow = False  # whether events were rare before the last call of `_decide`

    def update(self, count: int, now: float) -> int:
        """Choose the events that are clocked next, and return the number of events up to the next `update`.

        The event of the call is clocked.

        Args:
            count: the number of this event.
            now: the time of its emit in seconds, by `perf_counter`.
        """
        self.sampled = self._period > 1
        if self.sampled or count - self._count >= WINDOW:
            self._decide(count - self._count, now - self._at)
            self._count, self._at = count, now
            self.durations.clear()
        self.clocks_all = self._period == 1 and not self.sampled
        if self.clocks_all:
            return self._count + WINDOW - count  # up to the end of the window, at which `_decide` is called
        return self._period

    def _decide(self, events: int, seconds: float) -> None:
        """Set the sampling period for the next events.

        In a tight loop all events are clocked again only after two slow periods, because a single pause of
        the program makes one period slow.

        Args:
            events: the number of events since the last call.
            seconds: the time since the last call, in handlers and outside of them.
        """
        slow_seconds = min(ALWAYS_SECONDS, max(1, self.handlers) * HANDLER_SECONDS)
        slow = seconds >= events * slow_seconds
        longest = max(self.durations, default=0.0)
        if longest >= slow_seconds or (slow and (self._slow or self._period == 1)):
            self._period = 1
        elif not slow:
            # a period lasts at most `RARITY * slow_seconds`, of which clocking one event is 0.3 % / `RARITY`
            largest = RARITY * slow_seconds * events / seconds if seconds > 0 else PERIODS[-1]
            self._period = max([period for period in PERIODS if period <= largest], default=PERIODS[0])
        self._slow = slow
