"""Decide which calls of handlers are measured: counts are exact, times are sampled.

Two reads of the clock around every call would cost more than most handlers do. Instead each compiled plan
draws from a `Ticker`, one `next` in C per event; a drawn True sends that event through a measured twin of the
plan. The first `WARM_UP` events are all measured (an epoch event may never see more), then every
`PERIODS[0]`-th, after `LAPS` of those every `PERIODS[1]`-th, and so on. The periods are prime, so that a
handler that works every 10th or 100th iteration is sampled as often as others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, cycle, repeat

WARM_UP = 64
PERIODS = (17, 127, 1021)
"""A measured event costs about 0.5 us more per handler, a few nanoseconds when shared by a period. The first
stage serves short runs, which would otherwise have only a few late samples.
"""
LAPS = 64
DELIVERY_PERIOD = 7
"""After the warm-up every seventh delivery to a background subscriber is measured."""
_LAPS = {period: (False,) * (period - 1) + (True,) for period in PERIODS}


class Ticker:
    """Choose the events to measure, and count all events.

    Args:
        before: number of events that earlier tickers measured; this ticker continues from there.
        since: number of events since the last measured one.
        always: measure every event.
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
        """True if `ticks` was certainly not drawn yet. Always False after the warm-up."""
        return not self.measured and self._warm_up > 0

    @property
    def weight(self) -> int:
        """Number of events that the last measured event stands for."""
        lap = self.measured - self._warm_up - 1
        return 1 if lap < 0 else _period(self._laps_before + lap)

    def settle(self) -> tuple[int, int]:
        """Return how often `ticks` was drawn, in all and since the last True.

        This exhausts the iterator, so the plan must no longer use it.
        """
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
    """Return the number of events in the first laps."""
    stages = len(PERIODS) - 1
    full = sum(period * min(LAPS, max(0, laps - i * LAPS)) for i, period in enumerate(PERIODS[:-1]))
    return full + PERIODS[-1] * max(0, laps - stages * LAPS)


def _early_laps(lap: int) -> Iterator[bool]:
    """Return the laps from `lap` on, without those of the last stage.

    The iterator runs in C, because two emitting threads may draw at once, which a generator would refuse.
    """
    stages = [
        repeat(_LAPS[period], max(0, LAPS * (i + 1) - max(lap, LAPS * i)))
        for i, period in enumerate(PERIODS[:-1])
    ]
    return chain.from_iterable(chain.from_iterable(stages))
