"""Compare two series of times by their difference, its 95 % interval, and the noise within each.

Successive points are correlated, because a slow machine or loader stays slow for a while. So the interval
comes from a circular block bootstrap (Künsch 1989; Politis and Romano 1992), which draws blocks of n^(1/3)
successive points. The best block length grows at this rate (Hall, Horowitz and Jing 1995).
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
"""The number of series that are drawn from the points of each run."""
SEED = 20260
"""The seed of the resampling; it is fixed, so that comparing the same runs twice gives the same result."""
DECILE = 0.1
"""The quantile that the statistic "decile" takes."""
RARE = 0.1
"""Work is rare if the lower decile of its points is below this part of their mean."""
Points = NDArray[np.float64]
"""An array of times of shape (parts, points): each point is a stretch of a run.

For a whole iteration the parts are its phases; for a phase or a handler there is one part.
"""
Statistic = Literal["decile", "mean"]
"""The statistic by which series are compared: the lower decile of the points, or their mean.

With several parts, the deciles of the parts are added up. Other programs seldom delay all phases of one
iteration, so this sum is less noisy than the decile of the whole iteration.
"""
STRETCHES: dict[Statistic, int] = {"decile": 8, "mean": 4}
"""The number of equal stretches of a run that are compared with each other to estimate the noise.

For the mean they are fewer and longer, so that rare work occurs in each of them.
"""


class Difference(NamedTuple):
    """Hold the statistics of two series, `a` and `b`, and the interval of their difference, in their unit."""

    a: float
    b: float
    low: float
    """The lower end of the 95 % interval of `b - a`."""
    high: float
    spread: float
    """The noise within the run in which it is larger.

    It is the range of the statistic over the stretches of the run; for the decile it is at least the
    difference between the median and the decile.
    """
    statistic: Statistic


def difference(a: Points, b: Points, statistic: Statistic = "decile") -> Difference:
    """Compare two series with the same parts and at least eight points each.

    By default the lower decile is compared, and not the median, because other programs on the machine can
    only lengthen a point. Chen and Revels (2016) take the least time for the same reason.
    """
    measure = _MEASURES[statistic]
    # with two seeds, the draws from the two series are independent
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
    length = ceil(count ** (1 / 3))  # of a block, in points
    starts = np.random.default_rng(seed).integers(0, count, (RESAMPLES, ceil(count / length), 1))
    drawn = (starts + np.arange(length)).reshape(RESAMPLES, -1)[:, :count] % count
    statistics: Points = statistic(points[:, drawn])
    return statistics


def _spread(points: Points, statistic: Statistic) -> float:
    """Return the noise within a run, as in `Difference.spread`."""
    stretches = np.array_split(points, STRETCHES[statistic], axis=-1)
    range_over_run = float(np.ptp([_MEASURES[statistic](stretch) for stretch in stretches]))
    if statistic == "mean":
        return range_over_run
    median_above_decile = float(np.median(points, axis=-1).sum() - _decile(points))
    return max(range_over_run, median_above_decile)


def _decile(points: Points) -> Any:
    return np.quantile(points, DECILE, axis=-1).sum(axis=0)


def _mean(points: Points) -> Any:
    return points.mean(axis=-1).sum(axis=0)


_MEASURES: dict[Statistic, Callable[[Points], Any]] = {"decile": _decile, "mean": _mean}
