"""How a curve of any length becomes a bounded number of points."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from eventloop.reporting.curves import POINTS, Curve, reduced

NAN, INF = math.nan, math.inf


def curve(steps: range | list[int], values: list[float]) -> Curve:
    """The curve of these records."""
    return reduced("loss", "train", np.array(steps, np.int64), np.array(values))


def test_a_short_curve_is_kept_as_it_is() -> None:
    """Up to `POINTS` records each is a point, and there is no band."""
    steps, values = list(range(10, 10 * POINTS + 1, 10)), [1 / (i + 1) for i in range(POINTS)]

    made = curve(steps, values)

    assert (made.name, made.mode, made.count) == ("loss", "train", POINTS)
    assert (made.steps, made.mean, made.low, made.high) == (steps, values, [], [])


@pytest.mark.parametrize("count", [POINTS + 1, 12_345, 200_000])
def test_a_long_curve_keeps_what_is_extreme(count: int) -> None:
    """The points are at most `POINTS`; least and greatest values are exact, also those of the points."""
    values = np.random.default_rng(0).normal(size=count)
    values[count // 3], values[count // 2] = 50.0, -60.0

    made = curve(range(1, count + 1), values.tolist())

    assert POINTS // 2 <= len(made.steps) <= POINTS
    assert len(made.steps) == len(made.mean) == len(made.low) == len(made.high)
    assert (made.greatest, made.greatest_step) == (50.0, count // 3 + 1)
    assert (made.least, made.least_step) == (-60.0, count // 2 + 1)
    assert (max(made.high), min(made.low)) == (50.0, -60.0)
    assert (made.first, made.last) == (values[0], values[-1])
    assert all(a < b for a, b in pairwise(made.steps))


def test_points_are_the_means_of_neighbours() -> None:
    """As many records in each, the last ones apart."""
    count = 3 * POINTS + 1
    made = curve(range(count), [float(i) for i in range(count)])

    assert (made.low[:2], made.high[:2], made.mean[:2]) == ([0.0, 4.0], [3.0, 7.0], [1.5, 5.5])
    assert (made.steps[:2], made.steps[-1], made.mean[-1]) == ([1, 5], count - 1, count - 1)


def test_nan_and_infinities_are_counted_and_left_out() -> None:
    """A point without a finite value is NaN, and a curve of none has no least value and no step of it."""
    count = POINTS + POINTS // 2
    values = [1.0] * count
    values[10] = values[11] = NAN
    values[20], values[31] = INF, -INF

    made = curve(range(count), values)

    assert (made.not_finite, made.first_not_finite) == (4, 10)
    assert (made.least, made.greatest) == (1.0, 1.0)
    assert [*map(math.isnan, (made.mean[5], made.low[5]))] == [True, True]
    assert (made.mean[10], made.high[10], made.mean[15], made.low[15]) == (1.0, 1.0, 1.0, 1.0)
    none = curve([1, 2], [NAN, INF])
    assert [*map(math.isnan, (none.least, *none.mean))] == [True, True, True]
    assert (none.least_step, none.greatest_step, none.not_finite) == (None, None, 2)


def test_huge_numbers_overflow_nothing() -> None:
    """The mean of numbers whose sum is infinite, and the middle of two steps, stay between them."""
    end = 2**63 - 1
    made = curve(list(range(end - 3 * POINTS, end)), [1.7e308] * (3 * POINTS))

    assert set(made.mean) == {1.7e308}
    assert made.steps == sorted(made.steps)
    assert (made.steps[0] >= end - 3 * POINTS, made.last_step) == (True, end - 1)
