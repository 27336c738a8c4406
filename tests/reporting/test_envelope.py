"""A curve in a bounded number of points: exact while it is short, and without a spike lost when it is long."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from eventloop.reporting.downsample import POINTS, Downsampler

NAN, INF = math.nan, math.inf


def envelope(steps: list[int], values: list[float], *, each: int = 1000) -> Downsampler:
    """Of records that come in pieces."""
    made = Downsampler()
    for start in range(0, len(steps), each):
        made.add(steps[start : start + each], values[start : start + each])
    return made


def test_a_short_curve_is_kept_as_it_is() -> None:
    """Up to `POINTS` records each is a point, and there is no band."""
    steps, values = list(range(10, 10 * POINTS + 1, 10)), [1 / (i + 1) for i in range(POINTS)]

    curve = envelope(steps, values).curve("loss", "train")

    assert (curve.name, curve.mode, curve.count) == ("loss", "train", POINTS)
    assert (curve.steps, curve.mean, curve.low, curve.high) == (steps, values, [], [])


@pytest.mark.parametrize("count", [POINTS + 1, 12_345, 200_000])
@pytest.mark.parametrize("each", [1, 999, 65_536])
def test_a_long_curve_keeps_what_is_extreme(count: int, each: int) -> None:
    """The points are at most `POINTS`; least and greatest values are exact, also those of every point, whatever the
    pieces it came in."""
    if each == 1:
        count = min(count, 12_345)
    values = np.random.default_rng(0).normal(size=count)
    values[count // 3], values[count // 2] = 50.0, -60.0

    curve = envelope(list(range(1, count + 1)), values.tolist(), each=each).curve("loss", "train")

    assert POINTS // 2 <= len(curve.steps) <= POINTS
    assert len(curve.steps) == len(curve.mean) == len(curve.low) == len(curve.high)
    assert (curve.greatest, curve.greatest_step) == (50.0, count // 3 + 1)
    assert (curve.least, curve.least_step) == (-60.0, count // 2 + 1)
    assert (max(curve.high), min(curve.low)) == (50.0, -60.0)
    assert (curve.first, curve.last) == (values[0], values[-1])
    assert all(a < b for a, b in pairwise(curve.steps))


def test_points_are_the_means_of_neighbours() -> None:
    """As many records in each as a power of two, the last ones apart."""
    count = 3 * POINTS
    curve = envelope(list(range(count)), [float(i) for i in range(count)]).curve("i", "train")

    assert len(curve.steps) == pytest.approx(count / 4, abs=1)
    assert (curve.low[:2], curve.high[:2], curve.mean[:2]) == ([0.0, 4.0], [3.0, 7.0], [1.5, 5.5])
    assert curve.steps[:2] == [1, 5]


def test_nan_and_infinities_are_counted_and_left_out() -> None:
    """A point without a finite value is NaN; the others are of their finite values."""
    count = POINTS + POINTS // 2
    values = [1.0] * count
    values[10] = values[11] = NAN
    values[20], values[31] = INF, -INF

    curve = envelope(list(range(count)), values).curve("loss", "train")

    assert (curve.not_finite, curve.first_not_finite) == (4, 10)
    assert (curve.least, curve.greatest) == (1.0, 1.0)
    assert math.isnan(curve.mean[5])
    assert math.isnan(curve.low[5])
    assert (curve.mean[10], curve.high[10], curve.mean[15], curve.low[15]) == (1.0, 1.0, 1.0, 1.0)


def test_nothing_finite_at_all() -> None:
    """There is no least value, and no step of it."""
    curve = envelope([1, 2], [NAN, INF]).curve("loss", "train")

    assert math.isnan(curve.least)
    assert (curve.least_step, curve.greatest_step, curve.not_finite) == (None, None, 2)
    assert [*map(math.isnan, curve.mean)] == [True, True]


def test_huge_values_overflow_nothing() -> None:
    """The mean of numbers whose sum is no number stays between them."""
    curve = envelope(list(range(2 * POINTS)), [1.7e308] * (2 * POINTS)).curve("loss", "train")

    assert set(curve.mean) == {1.7e308}


def test_huge_steps_overflow_nothing() -> None:
    """The middle of two steps lies between them; the last one is exact."""
    end = 2**63 - 1
    curve = envelope(list(range(end - 2 * POINTS, end)), [1.0] * (2 * POINTS)).curve("loss", "train")

    assert curve.steps == sorted(curve.steps)
    assert curve.steps[0] >= end - 2 * POINTS
    assert curve.last_step == end - 1


@pytest.mark.parametrize("count", [3, 10_001])
def test_the_last_step_may_come_again(count: int) -> None:
    """The records of the last step are forgotten if it, or an earlier one, comes again; others never."""
    steps, values = [*range(count), count - 1], [0.0] * count + [7.0]
    again = envelope(steps, values)

    assert again.forget_from(count) == 0
    assert again.forget_from(count - 1) == 2
    assert again.forget_from(count - 1) == 0
    again.add([count - 1], [1.0])
    curve = again.curve("loss", "val")
    assert (curve.count, curve.last, curve.greatest) == (count, 1.0, 1.0)
