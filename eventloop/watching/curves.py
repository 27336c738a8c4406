"""Collect the curves of a run as its records come, each as a bounded number of points.

`logged` adds the records. When a curve has too many points, neighbours are merged, so a record costs the same
in a short run and in a long one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

from eventloop.costs.step_clock import TIMES
from eventloop.watching.view import CurveView


class Curve:
    """One scalar over the steps of a run, as at most `most` points of equally many records each."""

    def __init__(self, most: int) -> None:
        self._most, self._width = most, 1  # records of a point
        self._steps: list[int] = []  # the last step of each point
        self._records: list[int] = []
        self._finite: list[int] = []
        self._sums: list[float] = []
        self._low: list[float] = []
        self._high: list[float] = []
        self._last = math.nan
        self._last_step = 0

    def add(self, step: int, value: float) -> None:
        """Add the next record; one with a smaller step than the last replaces those from its step on."""
        if self._steps and step < self._steps[-1]:
            self.cut(step - 1)
        self._last, self._last_step = value, step
        if not self._records or self._records[-1] >= self._width:
            self._begin_point()
        self._steps[-1] = step
        self._records[-1] += 1
        if value - value == 0:  # finite
            self._finite[-1] += 1
            self._sums[-1] += value
            self._low[-1] = min(self._low[-1], value)
            self._high[-1] = max(self._high[-1], value)

    def cut(self, last: int) -> None:
        """Remove all points with records after the step `last`, because a resumed run repeats them."""
        kept = len(self._steps)
        while kept and self._steps[kept - 1] > last:
            kept -= 1
        for numbers in (self._steps, self._records, self._finite, self._sums, self._low, self._high):
            del numbers[kept:]
        if not kept:
            self._width = 1

    @property
    def empty(self) -> bool:
        """Whether it has no record, or only records that were cut off."""
        return not self._steps

    def view(self, name: str, mode: str) -> CurveView:
        """Return the points that the curve has so far, with its last value and its count, for a reader."""
        single = self._width == 1
        means = [
            min(max(total / finite, low), high) if finite else math.nan
            for total, finite, low, high in zip(self._sums, self._finite, self._low, self._high, strict=True)
        ]
        known = [finite > 0 for finite in self._finite]
        return CurveView(
            name=name,
            mode=mode,
            count=sum(self._records),
            last=self._last,
            last_step=self._last_step,
            steps=[*self._steps],
            mean=means,
            low=[] if single else _or_nan(self._low, known),
            high=[] if single else _or_nan(self._high, known),
        )

    def _begin_point(self) -> None:
        if len(self._steps) >= self._most:
            self._merge()
            if self._records[-1] < self._width:  # the last point had no neighbour
                return
        self._steps.append(0)
        self._records.append(0)
        self._finite.append(0)
        self._sums.append(0.0)
        self._low.append(math.inf)
        self._high.append(-math.inf)

    def _merge(self) -> None:
        """Merge each two neighbours into one point."""
        self._width *= 2
        self._steps = [*self._steps[1::2], *self._steps[len(self._steps) & ~1 :]]
        self._records = [sum(self._records[i : i + 2]) for i in range(0, len(self._records), 2)]
        self._finite = [sum(self._finite[i : i + 2]) for i in range(0, len(self._finite), 2)]
        self._sums = [sum(self._sums[i : i + 2]) for i in range(0, len(self._sums), 2)]
        self._low = [min(self._low[i : i + 2]) for i in range(0, len(self._low), 2)]
        self._high = [max(self._high[i : i + 2]) for i in range(0, len(self._high), 2)]


def _or_nan(values: Sequence[float], known: Sequence[bool]) -> list[float]:
    return [value if is_known else math.nan for value, is_known in zip(values, known, strict=True)]


class Choice:
    """The choice of the scalars that become curves.

    Args:
        patterns: names of scalars such as "loss" or "val/accuracy", or patterns such as "val/*" and "*". None
            stands for the loss of the training, and all that is validated or tested.
    """

    def __init__(self, patterns: Sequence[str] | None) -> None:
        self.patterns = patterns

    def has(self, mode: str, name: str) -> bool:
        """Return whether a scalar is chosen."""
        if self.patterns is None:
            return name == "loss" or (mode != "train" and name not in TIMES)
        return any(
            fnmatchcase(each, pattern) for each in (name, f"{mode}/{name}") for pattern in self.patterns
        )

    def missing(self, known: Sequence[str]) -> list[str]:
        """Return the patterns that none of the scalars fits, which are named "mode/name"."""
        return [
            pattern
            for pattern in self.patterns or ()
            if not any(
                fnmatchcase(each, pattern) or fnmatchcase(each.partition("/")[2], pattern) for each in known
            )
        ]
