"""Compare two series of times: the difference, its 95 % interval, and the size of differences by noise.

Successive points are correlated, because a slow machine or loader stays slow for a while. So the interval is
that of a circular block bootstrap (Künsch 1989; Politis and Romano 1992), which draws blocks of n^(1/3)
successive points. The best block length grows at this rate (Hall, Horowitz and Jing 1995).
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
SEED = 20260
"""The seed of the resampling; it is fixed, so that comparing the same runs twice gives the same result."""
DECILE = 0.1
RARE = 0.1
"""Work counts as rare if the lower decile of its points is below this part of their mean."""
Points = NDArray[np.float64]
"""Times of shape (parts, points), over successive stretches of a run.

The parts are the phases of an iteration; a handler has one part.
"""
Statistic = Literal["decile", "mean"]
"""The number that stands for a series: the lower decile of its points, or their mean.

For several parts it is the sum over the parts. Other programs seldom delay all phases of one iteration, so
this sum is less noisy than the decile of the whole time.
"""
STRETCHES: dict[Statistic, int] = {"decile": 8, "mean": 4}
"""The number of equal parts of a run that are compared with each other to estimate the noise.

The mean has fewer parts, so that rare work occurs in each of them.
"""


class Difference(NamedTuple):
    """The statistics of two series, `a` and `b`, and the interval of their difference, in their unit."""

    a: float
    b: float
    low: float
    """The lower end of the 95 % interval of `b - a`."""
    high: float
    spread: float
    """The noise within a run, for the run in which it is larger.

    It is the range of the statistic over the stretches of the run. For the decile it is at least the distance
    from the decile to the median.
    """
    statistic: Statistic


def difference(a: Points, b: Points, statistic: Statistic = "decile") -> Difference:
    """Compare two series with the same parts and at least eight points each.

    The statistic is the lower decile, below which a tenth of the points lie, and not the median: other
    programs on the machine can only lengthen a point. Chen and Revels (2016) take the least time for this
    reason.
    """
    measure = _MEASURES[statistic]
    differences = _resampled(b, measure, SEED + 1) - _resampled(a, measure, SEED)
    low, high = map(float, np.quantile(differences, (0.025, 0.975)))
    spread = max(_spread(points, statistic) for points in (a, b))
    return Difference(float(measure(a)), float(measure(b)), low, high, spread, statistic)


def rare(points: Points) -> bool:
    """Return whether most of the work is in few points, such as a checkpoint in every hundredth iteration."""
    return bool(_decile(points) < RARE * _mean(points))


def _resampled(points: Points, statistic: Callable[[Points], Any], seed: int) -> Points:
    """Return the statistic of each of `RESAMPLES` series resampled from the points."""
    count = points.shape[-1]
    length = ceil(count ** (1 / 3))
    starts = np.random.default_rng(seed).integers(0, count, (RESAMPLES, ceil(count / length), 1))
    drawn = (starts + np.arange(length)).reshape(RESAMPLES, -1)[:, :count] % count
    found: Points = statistic(points[:, drawn])
    return found


def _spread(points: Points, statistic: Statistic) -> float:
    stretches = np.array_split(points, STRETCHES[statistic], axis=-1)
    wandering = float(np.ptp([_MEASURES[statistic](stretch) for stretch in stretches]))
    above = float(np.median(points, axis=-1).sum() - _decile(points))
    return max(wandering, above) if statistic == "decile" else wandering


def _decile(points: Points) -> Any:
    return np.quantile(points, DECILE, axis=-1).sum(axis=0)


def _mean(points: Points) -> Any:
    return points.mean(axis=-1).sum(axis=0)


_MEASURES: dict[Statistic, Callable[[Points], Any]] = {"decile": _decile, "mean": _mean}
