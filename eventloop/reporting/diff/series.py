"""Extract the times of each phase and handler over a run from a cost record, in seconds per iteration.

A series has a value for each point of the record's trend, and a point covers equally many iterations.
"""

from __future__ import annotations

from math import ceil
from typing import Literal, NamedTuple

import numpy as np

from eventloop.costs.records import HANDLER_POINT, PHASES, WAITING, WAITS, HandlerCost, RunCosts
from eventloop.costs.shares import own_seconds
from eventloop.reporting.diff.bootstrap import Points
from eventloop.reporting.run_tables import by_key, phase_name
from eventloop.reporting.waits import seconds_waited

WARM_UP = 0.1
"""This share of a series' points, the first ones, is left out, because compilation makes them slow."""
LEAST_POINTS = 10
"""The fewest points after the warm-up for which noise is estimated."""
LEAST_ITERATIONS = 12
"""The fewest iterations that yield `LEAST_POINTS` after the warm-up, which takes 2 of 12 points.

In a run of up to 512 iterations each one is a point.
"""

Kind = Literal["iteration", "phase", "handler", "outside", "wait"]
"""The kind of a row. `outside` is a handler, and `wait` the waits of one cause, outside of iterations.

Rows of these two kinds have no points.
"""
OUTSIDE = ", outside of iterations"
WAIT_ROWS = frozenset(f"{name}{where}" for name in WAITING.values() for where in ("", OUTSIDE))
"""The names of the rows of waits. Such a row is shown only if one of the runs has waits of its cause."""
ITERATION = "an iteration"


class Series(NamedTuple):
    """Hold the times of a phase or a handler, in seconds per iteration."""

    kind: Kind
    mean: float
    """The mean over the whole run."""
    points: Points | None
    """The means over the points, of shape (parts, points), without the warm-up.

    None if the points are unknown or too few. Only the whole iteration has several parts, its phases.
    """


def series_of(costs: RunCosts) -> dict[str, Series]:
    """Return the series of the whole iteration, of each phase, wait and called handler, by name.

    The times of a handler that runs phases, such as the optimizer hook, do not include these phases.
    """
    points = [point.phases for point in costs.trend if point.phases.iterations]
    # the last point is left out if it covers fewer iterations
    points = [point for point in points if point.iterations == points[0].iterations]
    per_point, iterations = points[0].iterations if points else 0, max(1, costs.phases.iterations)
    names = (*PHASES, *WAITS)
    seconds = {name: np.array([[getattr(point, name) for point in points]], np.float64) for name in names}
    whole = _usable(np.concatenate([*seconds.values()]), per_point)
    series = {ITERATION: Series("iteration", costs.phases.wall / iterations, whole)}
    for name in names:
        mean = getattr(costs.phases, name) / iterations
        series[phase_name(name)] = Series("phase", mean, _usable(seconds[name], per_point))
    for cause in WAITS:
        waited = seconds_waited(costs, cause) - seconds_waited(costs, cause, "iterations")
        series[f"{WAITING[cause]}{OUTSIDE}"] = Series("wait", waited / iterations, None)
    for key, handler in by_key(costs).items():
        kind: Kind = "handler" if handler.in_iteration else "outside"
        mean = own_seconds(handler, costs.phases) / iterations
        series[key] = Series(kind, mean, _handler_points(handler, seconds, per_point))
    return series


def _handler_points(handler: HandlerCost, phase_seconds: dict[str, Points], per_point: int) -> Points | None:
    """Return a handler's times without the phases that it runs; None if not all calls were measured.

    A point of a handler covers `HANDLER_POINT` points of the trend.

    Args:
        phase_seconds: the seconds of each phase at each point of the trend.
        per_point: the number of iterations of a point of the trend.
    """
    count = phase_seconds[PHASES[0]].shape[1] // HANDLER_POINT
    if len(handler.trend) < count:  # also if an older version of eventloop wrote the file
        return None
    seconds = np.array([handler.trend[:count]], np.float64)
    for phase in handler.includes:
        covered = phase_seconds[phase][:, : count * HANDLER_POINT]
        seconds -= covered.reshape(1, count, HANDLER_POINT).sum(axis=2)
    return _usable(seconds, per_point * HANDLER_POINT)


def _usable(seconds: Points, iterations: int) -> Points | None:
    """Return the points after the warm-up in seconds per iteration; None if they are too few.

    Args:
        seconds: the sum at each point.
        iterations: the number of iterations of a point.
    """
    points = seconds[:, ceil(seconds.shape[1] * WARM_UP) :]
    return points / iterations if points.shape[1] >= LEAST_POINTS else None
