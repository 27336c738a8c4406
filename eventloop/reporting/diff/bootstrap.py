"""Compare two series of points: the difference, its 95 % interval, and the difference that noise makes.

Successive points are correlated, because a machine is slow or a loader behind for some time. So the interval
is that of a circular block bootstrap (Künsch 1989; Politis and Romano 1992), which draws blocks of n^(1/3)
successive points; the best length grows so (Hall, Horowitz and Jing 1995).
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
SEED = 20260
"""Fixed, so that two comparisons of the same runs are equal."""
DECILE = 0.1
RARE = 0.1
"""The part of the mean below which the lower decile misses most of the work."""
Points = NDArray[np.float64]
"""Of shape (parts, points): the phases of an iteration, or one handler, by successive stretches of a run."""
Statistic = Literal["decile", "mean"]
"""The lower decile of the points, or their mean. Of several parts it is the sum over them: other programs
seldom delay all phases of one iteration, so the sum is less noisy than the statistic of the whole time.
"""
STRETCHES: dict[Statistic, int] = {"decile": 8, "mean": 4}
"""Equal parts of a run, between which a statistic differs; work that is rare is not in each eighth."""


class Difference(NamedTuple):
    """The difference of two series, the second less the first, in the unit of their points."""

    a: float
    b: float
    low: float
    """Lower end of the 95 % interval of `b - a`."""
    high: float
    spread: float
    """How much the statistic differs between the stretches of one run, or how far the median is above the
    decile, whichever is more; of the run where it is larger.
    """
    statistic: Statistic


def difference(a: Points, b: Points, statistic: Statistic = "decile") -> Difference:
    """Compare two series, each of the same parts and of at least eight points.

    A tenth of the points is below the lower decile. It is compared, and not the median, because other
    programs on the machine only ever make a point longer; Chen and Revels (2016) take the least time.
    """
    measure = _MEASURES[statistic]
    differences = _resampled(b, measure, SEED + 1) - _resampled(a, measure, SEED)
    low, high = np.quantile(differences, (0.025, 0.975))
    return Difference(
        a=float(measure(a)), b=float(measure(b)), low=float(low), high=float(high),
        spread=max(_spread(points, statistic) for points in (a, b)), statistic=statistic,
    )  # fmt: skip


def rare(points: Points) -> bool:
    """Return whether most of the work is in a few points, as a checkpoint in each hundredth iteration is."""
    return bool(_decile(points) < RARE * _mean(points))


def block_length(points: int) -> int:
    """Return the number of successive points that are drawn together."""
    return ceil(float(points ** (1 / 3)))


def _resampled(points: Points, statistic: Callable[[Points], Any], seed: int) -> Points:
    """Return the statistic of each of `RESAMPLES` series that are drawn from the points."""
    count = points.shape[-1]
    length = block_length(count)
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
