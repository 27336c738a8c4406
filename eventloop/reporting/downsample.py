"""Reduce a curve of any length to a bounded number of points without losing a spike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

POINTS = 2000
"""The largest number of points of one curve; a screen shows no more."""
WAITING = 2048
"""Records that are merged into points at once, so many that the overhead of numpy's calls vanishes."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One scalar over the steps of a run, as at most `POINTS` points.

    A point stands for one record, or in a long run for about `count / len(steps)` consecutive records: their
    mean, least and greatest value. NaN, null in JSON, means that no value was finite.
    """

    name: str
    mode: str
    """train, val or test."""
    count: int
    """Number of records."""
    first: float
    last: float
    last_step: int
    """The last of all records' steps; a point of several records has the middle one."""
    least: float
    """The least finite value; `greatest` is the greatest one."""
    least_step: int | None
    """Its step; None if no value is finite."""
    greatest: float
    greatest_step: int | None
    not_finite: int
    """Number of values that were NaN or infinite."""
    first_not_finite: int | None
    """The step of the first of them."""
    steps: list[int]
    """Completed iterations: for each point, the middle of its records' steps."""
    mean: list[float]
    low: list[float]
    """Least value of each point; `low` and `high` are empty if each point is one record."""
    high: list[float]


class Downsampler:
    """Collect the records of a curve in the order of their steps, as a bounded number of points.

        downsampler = Downsampler()
        downsampler.add([10, 20, 30], [0.9, 0.7, float("nan")])
        downsampler.curve("loss", "train").steps  # [10, 20, 30]

    Up to `POINTS` records, each is a point. Beyond, neighbouring points are merged in pairs, as often as
    needed; so memory is bounded, and least and greatest values stay exact.
    """

    def __init__(self) -> None:
        self._points = _Points.empty()
        self._facts = _Facts()
        self._width = 1
        self._steps: list[int] = []
        self._values: list[float] = []

    def add(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add records: two sequences of equal length."""
        self._steps += steps
        self._values += values
        if len(self._steps) >= max(2 * self._width, WAITING):
            last = self._steps[-1]
            settled = next((i for i in range(len(self._steps), 0, -1) if self._steps[i - 1] != last), 0)
            self._reduce(settled // self._width * self._width)

    def forget_from(self, step: int) -> int:
        """Drop the newest records if they are of `step` or later, and return how many were dropped.

        A run that went back to `step` logs these records again.
        """
        if not self._steps or self._steps[-1] < step:
            return 0
        kept = next((i for i in range(len(self._steps), 0, -1) if self._steps[i - 1] < step), 0)
        forgotten = len(self._steps) - kept
        del self._steps[kept:], self._values[kept:]
        return forgotten

    def curve(self, name: str, mode: str) -> Curve:
        """Return the curve of all records added so far; at least one is required."""
        self._reduce(len(self._steps))
        points, merged = self._points, self._width > 1
        return Curve(
            name=name,
            mode=mode,
            **msgspec.structs.asdict(self._facts),
            steps=(points.first + (points.last - points.first) // 2).tolist(),
            mean=points.mean().tolist(),
            low=points.low.tolist() if merged else [],
            high=points.high.tolist() if merged else [],
        )

    def _reduce(self, number: int) -> None:
        """Merge the first `number` waiting records into points."""
        if not number:
            return
        steps, values = np.array(self._steps[:number], np.int64), np.array(self._values[:number], np.float64)
        del self._steps[:number], self._values[:number]
        self._facts.note(steps, values)
        self._points = self._points.extended(_Points.of(steps, values, self._width))
        while len(self._points.first) > POINTS:
            self._points = self._points.halved()
            self._width *= 2


class _Facts(msgspec.Struct, kw_only=True):
    """The fields of `Curve` that describe all of its records."""

    count: int = 0
    first: float = math.nan
    last: float = math.nan
    last_step: int = 0
    least: float = math.nan
    least_step: int | None = None
    greatest: float = math.nan
    greatest_step: int | None = None
    not_finite: int = 0
    first_not_finite: int | None = None

    def note(self, steps: Integers, values: Floats) -> None:
        """Take in more records, at least one."""
        if not self.count:
            self.first = float(values[0])
        self.last, self.last_step = float(values[-1]), int(steps[-1])
        self.count += len(values)
        finite = np.isfinite(values)
        if not finite.all():
            bad = steps[~finite]
            self.not_finite += len(bad)
            if self.first_not_finite is None:
                self.first_not_finite = int(bad[0])
            steps, values = steps[finite], values[finite]
        if len(values):
            low, high = int(values.argmin()), int(values.argmax())
            if self.least_step is None or values[low] < self.least:
                self.least, self.least_step = float(values[low]), int(steps[low])
            if self.greatest_step is None or values[high] > self.greatest:
                self.greatest, self.greatest_step = float(values[high]), int(steps[high])


class _Points(msgspec.Struct, frozen=True):
    """Columns with one element a point; `low` and `high` are infinite if no value of the point is finite.

    `first` and `last` are steps, `total` and `finite` the sum and the number of finite values.
    """

    first: Integers
    last: Integers
    total: Floats
    finite: Integers
    low: Floats
    high: Floats

    @staticmethod
    def empty() -> _Points:
        """Return no points."""
        whole, real = np.empty(0, np.int64), np.empty(0, np.float64)
        return _Points(whole, whole, real, whole, real, real)

    @staticmethod
    def of(steps: Integers, values: Floats, width: int) -> _Points:
        """Return points of `width` records each; the last point may have fewer."""
        finite = np.isfinite(values)
        starts = np.arange(0, len(steps), width)
        ends = np.minimum(starts + width, len(steps)) - 1
        number = np.add.reduceat(finite.astype(np.int64), starts)
        low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
        high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
        with np.errstate(over="ignore", invalid="ignore"):
            total = np.add.reduceat(np.where(finite, values, 0.0), starts)
        return _Points(steps[starts], steps[ends], total, number, *_without_infinities(low, high, number))

    def extended(self, more: _Points) -> _Points:
        """Return these points followed by `more`."""
        return _Points(*(np.concatenate(pair) for pair in zip(_columns(self), _columns(more), strict=True)))

    def halved(self) -> _Points:
        """Return half as many points, each merged from two; an odd last one stays as it is."""
        starts = np.arange(0, len(self.first), 2)
        ends = np.minimum(starts + 1, len(self.first) - 1)
        with np.errstate(over="ignore", invalid="ignore"):
            total = np.add.reduceat(self.total, starts)
        return _Points(
            self.first[starts],
            self.last[ends],
            total,
            np.add.reduceat(self.finite, starts),
            np.fmin.reduceat(self.low, starts),
            np.fmax.reduceat(self.high, starts),
        )

    def mean(self) -> Floats:
        """Return the mean of each point, NaN if no value is finite."""
        with np.errstate(invalid="ignore", divide="ignore"):
            mean: Floats = self.total / self.finite
        return np.clip(mean, self.low, self.high)  # rounding may move the mean of equal values


def _without_infinities(low: Floats, high: Floats, number: Integers) -> tuple[Floats, Floats]:
    return np.where(number, low, np.nan), np.where(number, high, np.nan)


def _columns(points: _Points) -> tuple[Any, ...]:
    return points.first, points.last, points.total, points.finite, points.low, points.high
