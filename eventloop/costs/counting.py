"""Which calls of handlers to measure: exact counts and sampled times, at the price of one `next` in C per event.

A clock pair around every call would cost more than most handlers do. Instead each compiled plan draws from a
`Ticker`; a drawn True sends that one event down a measured twin of the plan. All of the first `WARM_UP` events
are measured (an epoch event may never see more), then every `PERIODS[0]`-th, after `LAPS` of those every
`PERIODS[1]`-th, and so on. The periods are prime, so that a handler that works every 10th or 100th iteration is met
as often as its neighbours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, cycle, repeat

WARM_UP = 64
PERIODS = (17, 127, 1021)
"""An event that is measured costs some 0.5 us a handler more: shared by so many it is a few nanoseconds. The first stage
is for short runs, whose late calls would be told by a handful."""
LAPS = 64
DELIVERY_PERIOD = 7
"""Deliveries to a background subscriber can afford more: after the warm-up each of so many is measured."""
_LAPS = {period: (False,) * (period - 1) + (True,) for period in PERIODS}


class Ticker:
    """Says which events to measure, and how many there were.

    Args:
        before: how many were measured by the tickers before this one, which goes on from there.
        since: how many events have been since the last of those.
        always: measure each.
    """

    __slots__ = ("_before", "_laps_before", "_since", "_warm_up", "measured", "ticks")

    def __init__(self, before: int = 0, since: int = 0, *, always: bool = False) -> None:
        self._warm_up = sys.maxsize if always else max(0, WARM_UP - before)
        self._laps_before = max(0, before - WARM_UP)
        self._since = 0 if always or self._warm_up else since
        self.measured = 0
        first = _LAPS[_period(self._laps_before)][self._since :]
        self.ticks: Iterator[bool] = chain(
            repeat(True, self._warm_up), first, _early_laps(self._laps_before + 1), cycle(_LAPS[PERIODS[-1]])
        )

    @property
    def untouched(self) -> bool:
        """True where it is sure that `ticks` was not drawn yet; once warm, it never is."""
        return not self.measured and self._warm_up > 0

    @property
    def weight(self) -> int:
        """Of how many events the one that was measured last is one."""
        lap = self.measured - self._warm_up - 1
        return 1 if lap < 0 else _period(self._laps_before + lap)

    def settle(self) -> tuple[int, int]:
        """Return how often `ticks` was drawn, and how often since the last True. It uses the iterator up: the plan
        must have left it already."""
        if self.measured < self._warm_up:
            return self.measured, 0
        laps = self.measured - self._warm_up
        left_in_this_lap = next(i for i, tick in enumerate(self.ticks, start=1) if tick)
        since = _period(self._laps_before + laps) - left_in_this_lap
        before, now = _events(self._laps_before), _events(self._laps_before + laps)
        return self._warm_up + now - before + since - self._since, since


def _period(lap: int) -> int:
    return PERIODS[min(lap // LAPS, len(PERIODS) - 1)]


def _events(laps: int) -> int:
    """How many events the first laps are."""
    stages = len(PERIODS) - 1
    full = sum(period * min(LAPS, max(0, laps - i * LAPS)) for i, period in enumerate(PERIODS[:-1]))
    return full + PERIODS[-1] * max(0, laps - stages * LAPS)


def _early_laps(lap: int) -> Iterator[bool]:
    """The laps from one on, those of the last stage left out. All of it is C: a generator that two emitting threads draw
    from at once is an error."""
    stages = [
        repeat(_LAPS[period], max(0, LAPS * (i + 1) - max(lap, LAPS * i)))
        for i, period in enumerate(PERIODS[:-1])
    ]
    return chain.from_iterable(chain.from_iterable(stages))
