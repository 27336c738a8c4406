"""A curve of any length in a bounded number of points, none of whose spikes is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

POINTS = 2000
"""At most so many are kept of one curve; more screens do not show."""
WAITING = 2048
"""Records that are made points of at once: enough of them that numpy's calls cost nothing."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One scalar over the steps of a run. A point stands for one record, or in a long run for as many as
    `count / len(steps)`, which follow each other: their mean, their least and their greatest value.

    NaN is what has no finite value in it; in JSON it is null.
    """

    name: str
    mode: str
    """train, val or test."""
    count: int
    """Records in all."""
    first: float
    last: float
    last_step: int
    """Of all records; a point that stands for several has the middle one."""
    least: float
    """Of the finite values, as `greatest`."""
    least_step: int | None
    """None where no value is finite."""
    greatest: float
    greatest_step: int | None
    not_finite: int
    """How many values were NaN or infinite."""
    first_not_finite: int | None
    """The step of the first one."""
    steps: list[int]
    """Completed iterations: the middle of the steps that a point stands for."""
    mean: list[float]
    low: list[float]
    """Empty where each point is one record, as `high`."""
    high: list[float]


class Envelope:
    """Takes the records of a curve in the order of their steps, and keeps points of it.

        envelope = Envelope()
        envelope.add([10, 20, 30], [0.9, 0.7, float("nan")])
        envelope.curve("loss", "train").steps  # [10, 20, 30]

    While there are at most `POINTS` records each is a point. From then on neighbours are merged, pair by pair, as
    often as it takes; so the memory is bounded, and least and greatest values stay exact.
    """

    def __init__(self) -> None:
        self._points = _Points.empty()
        self._facts = _Facts()
        self._width = 1
        self._steps: list[int] = []
        self._values: list[float] = []

    def add(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Take more records; as many of both."""
        self._steps += steps
        self._values += values
        if len(self._steps) >= max(2 * self._width, WAITING):
            last = self._steps[-1]
            settled = next((i for i in range(len(self._steps), 0, -1) if self._steps[i - 1] != last), 0)
            self._reduce(settled // self._width * self._width)

    def forget_from(self, step: int) -> int:
        """Forget the records of the last step if that is `step` or a later one, because they come again; returns how
        many."""
        if not self._steps or self._steps[-1] < step:
            return 0
        kept = next((i for i in range(len(self._steps), 0, -1) if self._steps[i - 1] < step), 0)
        forgotten = len(self._steps) - kept
        del self._steps[kept:], self._values[kept:]
        return forgotten

    def curve(self, name: str, mode: str) -> Curve:
        """What there is of it by now; at least one record was added."""
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
        """Make points of the first `number` records that wait."""
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
    """Those of `Curve` that are of all its records."""

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
        """Take more records, at least one."""
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
    """Columns, one element a point: the first and the last step, the sum and the number of finite values, the least
    and the greatest of them (infinite where there is none)."""

    first: Integers
    last: Integers
    total: Floats
    finite: Integers
    low: Floats
    high: Floats

    @staticmethod
    def empty() -> _Points:
        whole, real = np.empty(0, np.int64), np.empty(0, np.float64)
        return _Points(whole, whole, real, whole, real, real)

    @staticmethod
    def of(steps: Integers, values: Floats, width: int) -> _Points:
        """Points of `width` records each; the last one may stand for fewer."""
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
        """These, and `more` of them."""
        return _Points(*(np.concatenate(pair) for pair in zip(_columns(self), _columns(more), strict=True)))

    def halved(self) -> _Points:
        """Half as many: each is made of two; an odd last one stays by itself."""
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
        """NaN where no value is finite."""
        with np.errstate(invalid="ignore", divide="ignore"):
            mean: Floats = self.total / self.finite
        return np.clip(mean, self.low, self.high)  # rounded, the mean of equal values may be beside them


def _without_infinities(low: Floats, high: Floats, number: Integers) -> tuple[Floats, Floats]:
    return np.where(number, low, np.nan), np.where(number, high, np.nan)


def _columns(points: _Points) -> tuple[Any, ...]:
    return points.first, points.last, points.total, points.finite, points.low, points.high
