"""Points measured over many rounds, the straight line through their medians, and whether they deserve to be called one.

A series is called straight if R² is at least 0.99, and level if no median is more than 10 % from the middle one. Of any
other series no slope is quoted, only the range of its medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np

STRAIGHT, LEVEL = 0.99, 0.10
"""The least R² of a straight line, and how far a median of a level line may be from the middle one, as a part of it."""


Shape = Literal["straight", "level", "neither"]


@dataclass(frozen=True)
class Fit:
    """A least-squares line `intercept + slope * x`."""

    slope: float
    intercept: float
    r2: float
    """Coefficient of determination. Of a flat line, whose points differ by noise only, it is near 0."""
    residual: float
    """The largest, in the unit of y, with its sign: measured less line."""
    residual_share: float
    """The largest as a part of the measured value, 0..1; not always of the same point."""

    def at(self, x: float) -> float:
        """The line's value."""
        return self.intercept + self.slope * x


@dataclass
class Series:
    """What was measured at each `x`, once a round.

    Args:
        name: what y is.
        unit: of y.
        per: what x counts, in the singular.
        relative: fit relative residuals, so that each decade counts; else absolute ones.
        each: how much of x the slope is given for: 1e6 for "a million iterations".
    """

    name: str
    unit: str
    per: str
    relative: bool = False
    each: float = 1.0
    samples: dict[float, list[float]] = field(default_factory=dict)

    def add(self, x: float, y: float) -> None:
        """Note a measurement."""
        self.samples.setdefault(x, []).append(y)

    @property
    def xs(self) -> list[float]:
        """Return the values of x that were measured, in ascending order."""
        return sorted(self.samples)

    @property
    def ys(self) -> list[float]:
        """Return the medians of y, in the order of `xs`."""
        return [statistics.median(self.samples[x]) for x in self.xs]

    def fit(self) -> Fit:
        """The line through the medians."""
        return fit(self.xs, self.ys, relative=self.relative)

    @property
    def slope_text(self) -> str:
        """The slope with its unit."""
        return f"{self.fit().slope * self.each:.3g} {self.unit} / {self.per}"

    @property
    def middle(self) -> float:
        """The middle one of the medians."""
        return statistics.median(self.ys)

    @property
    def spread(self) -> float:
        """How far a median is from the middle one at most, as a part of that."""
        return max(abs(y - self.middle) for y in self.ys) / self.middle

    @property
    def shape(self) -> Shape:
        """What the medians may be called."""
        if self.spread <= LEVEL:
            return "level"
        return "straight" if self.fit().r2 >= STRAIGHT else "neither"

    @property
    def text(self) -> str:
        """What the medians say, in words: a slope only where they are on a straight line."""
        if self.shape == "straight":
            return f"{self.slope_text}, straight (R² {self.fit().r2:.3f})"
        if self.shape == "level":
            return f"{digits(self.middle)} {self.unit}, level within {self.spread * 100:.0f} %"
        return f"{digits(min(self.ys))} to {digits(max(self.ys))} {self.unit}, no straight line"

    @classmethod
    def of(cls, name: str, record: dict[str, Any]) -> Self:
        """Return the series that `record` was made of."""
        samples = dict(zip(record["x"], record["samples"], strict=True))
        return cls(name, record["unit"], record["per"], record["relative"], record["each"], samples)

    @property
    def quartiles(self) -> list[tuple[float, float]]:
        """Lower and upper, at each x."""
        return [_quartiles(self.samples[x]) for x in self.xs]

    def record(self) -> dict[str, Any]:
        """What the JSON keeps."""
        line = self.fit()
        return {
            "unit": self.unit,
            "per": self.per,
            "relative": self.relative,
            "each": self.each,
            "x": self.xs,
            "median": self.ys,
            "samples": [self.samples[x] for x in self.xs],
            "quartiles": self.quartiles,
            "slope": line.slope,
            "slope_text": self.slope_text,
            "intercept": line.intercept,
            "r2": line.r2,
            "largest_residual": line.residual,
            "largest_residual_share": line.residual_share,
        }


def fit(xs: Sequence[float], ys: Sequence[float], *, relative: bool = False) -> Fit:
    """Least squares; with `relative`, of residuals divided by y, weights as in weighted least squares."""
    x, y = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    weights = 1.0 / np.abs(y) if relative else np.ones_like(y)
    scale = x.max() or 1.0  # keeps the normal equations well conditioned over many decades
    slope, intercept = (float(value) for value in np.polyfit(x / scale, y, 1, w=weights))
    slope /= float(scale)
    residuals = y - (intercept + slope * x)
    mean = np.average(y, weights=weights**2)
    spread = float(np.sum((weights * (y - mean)) ** 2))
    r2 = 1.0 - float(np.sum((weights * residuals) ** 2)) / spread if spread else 1.0
    largest = float(residuals[np.argmax(np.abs(residuals))])
    return Fit(slope, intercept, r2, largest, float(np.max(np.abs(residuals / y))))


def digits(value: float) -> str:
    """Format a number with three digits, and never with an exponent."""
    return f"{float(f'{value:.3g}'):,g}" if abs(value) < 1e6 else f"{value:,.0f}"


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
