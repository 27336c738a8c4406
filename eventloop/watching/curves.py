"""Collect the curves of a run from its records, each as a bounded number of points.

`logged` adds the records. When a curve has too many points, each two neighbouring points are merged, so its
memory and the cost of a record stay the same in a long run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

from eventloop.costs.step_clock import TIMES
from eventloop.watching.view import CurveView


class Curve:
    """Collect the values of one scalar over a run, as a bounded number of points.

    Each point has the mean, least and greatest value of equally many neighbouring records; the last point may
    have fewer.

    Args:
        most: the largest number of points.
    """

    def __init__(self, most: int) -> None:
        self._most, self._width = most, 1  # the largest number of points, and of records in a point
        # one entry for each point
        self._steps: list[int] = []  # the step of its last record
        self._records: list[int] = []  # the number of its records
        self._finite: list[int] = []  # the number of its records with a finite value
        self._sums: list[float] = []  # the sum of the finite values
        self._low: list[float] = []  # the least finite value
        self._high: list[float] = []  # the greatest finite value
        self._last = math.nan
        self._last_step = 0

    def add(self, step: int, value: float) -> None:
        """Add a record of the scalar.

        If the step is below the last one, a run was resumed, and logs the records from this step on again. So
        the points from this step on are removed first.

        Args:
            step: the number of completed iterations.
            value: the value of the scalar, which need not be finite.
        """
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
        """Remove all points that have a record after the step `last`.

        A run that is resumed after that step logs the later records again.
        """
        kept = len(self._steps)  # the number of points that stay
        while kept and self._steps[kept - 1] > last:
            kept -= 1
        for values_of_points in (
            self._steps,
            self._records,
            self._finite,
            self._sums,
            self._low,
            self._high,
        ):
            del values_of_points[kept:]
        if not kept:
            self._width = 1

    @property
    def empty(self) -> bool:
        """True if the curve has no points."""
        return not self._steps

    def view(self, name: str, mode: str) -> CurveView:
        """Return the present points as a `CurveView` with the given name and mode."""
        single = self._width == 1  # each point is one record, so the mean is also the least and greatest
        means = [
            min(max(total / finite, low), high) if finite else math.nan
            for total, finite, low, high in zip(self._sums, self._finite, self._low, self._high, strict=True)
        ]
        has_value = [finite > 0 for finite in self._finite]
        return CurveView(
            name=name,
            mode=mode,
            count=sum(self._records),
            last=self._last,
            last_step=self._last_step,
            steps=[*self._steps],
            mean=means,
            low=[] if single else _or_nan(self._low, has_value),
            high=[] if single else _or_nan(self._high, has_value),
        )

    def _begin_point(self) -> None:
        """Add an empty point for the next record; at the limit, merge points first."""
        if len(self._steps) >= self._most:
            self._merge()
            if self._records[-1] < self._width:
                return  # the number of points was odd, so the last one was not merged and has room
        self._steps.append(0)
        self._records.append(0)
        self._finite.append(0)
        self._sums.append(0.0)
        self._low.append(math.inf)
        self._high.append(-math.inf)

    def _merge(self) -> None:
        """Merge each two neighbouring points into one."""
        self._width *= 2
        self._steps = [*self._steps[1::2], *self._steps[len(self._steps) & ~1 :]]
        self._records = [sum(self._records[i : i + 2]) for i in range(0, len(self._records), 2)]
        self._finite = [sum(self._finite[i : i + 2]) for i in range(0, len(self._finite), 2)]
        self._sums = [sum(self._sums[i : i + 2]) for i in range(0, len(self._sums), 2)]
        self._low = [min(self._low[i : i + 2]) for i in range(0, len(self._low), 2)]
        self._high = [max(self._high[i : i + 2]) for i in range(0, len(self._high), 2)]


def _or_nan(values: Sequence[float], has_value: Sequence[bool]) -> list[float]:
    return [value if has else math.nan for value, has in zip(values, has_value, strict=True)]


class Choice:
    """Decide which scalars become curves.

    Args:
        patterns: names of scalars such as "loss" or "val/accuracy", or patterns such as "val/*" and "*". None
            stands for the loss of the training and all scalars of validations and tests.
    """

    def __init__(self, patterns: Sequence[str] | None) -> None:
        self.patterns = patterns

    def has(self, mode: str, name: str) -> bool:
        """Return whether a scalar is chosen."""
        if self.patterns is None:
            return name == "loss" or (mode != "train" and name not in TIMES)
        return any(_fits(f"{mode}/{name}", pattern) for pattern in self.patterns)

    def missing(self, known: Sequence[str]) -> list[str]:
        """Return the patterns that fit none of the scalars.

        Args:
            known: the scalars, each named as "mode/name".
        """
        patterns = self.patterns or ()
        return [pattern for pattern in patterns if not any(_fits(scalar, pattern) for scalar in known)]


def _fits(scalar: str, pattern: str) -> bool:
    """Return whether a pattern fits a scalar, named "mode/name", with or without its mode."""
    return fnmatchcase(scalar, pattern) or fnmatchcase(scalar.partition("/")[2], pattern)
