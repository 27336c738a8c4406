"""Extract series of times, in seconds per iteration, of each phase and handler from a cost record.

A series has a value for each point of the record's trend.
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
"""The part of a series that is left out at its begin, in which compilation and caches take time."""
LEAST_POINTS = 10
"""The fewest points after the warm-up from which noise can be estimated."""
LEAST_ITERATIONS = 12
"""The fewest iterations that give `LEAST_POINTS`; in a run of up to 512, each iteration is a point."""

Kind = Literal["iteration", "phase", "handler", "outside", "wait"]
"""The kind of a row; handlers (`outside`) and waits (`wait`) outside of iterations have no points."""
OUTSIDE = ", outside of iterations"
WAIT_ROWS = frozenset(f"{name}{where}" for name in WAITING.values() for where in ("", OUTSIDE))
"""The names of the rows of waits, which are shown if either run has such waits."""
ITERATION = "an iteration"


class Series(NamedTuple):
    """The times of a phase or a handler, in seconds per iteration: the mean, and that of each point."""

    kind: Kind
    mean: float
    """The mean over the whole run."""
    points: Points | None
    """An array of shape (parts, points) without the warm-up, or None if the points are unknown or too few.

    Each point covers equally many iterations. The parts of a whole iteration are its phases.
    """


def series_of(costs: RunCosts) -> dict[str, Series]:
    """Return the series of the whole iteration, of each phase and of each called handler, by name.

    The time of a handler that runs phases, such as the optimizer hook, is counted without these phases.
    """
    points = [point.phases for point in costs.trend if point.phases.iterations]
    # the last point may have fewer iterations
    points = [point for point in points if point.iterations == points[0].iterations]
    each, iterations = points[0].iterations if points else 0, max(1, costs.phases.iterations)
    names = (*PHASES, *WAITS)
    seconds = {name: np.array([[getattr(p, name) for p in points]], np.float64) for name in names}
    whole = _usable(np.concatenate([*seconds.values()]), each)
    found = {ITERATION: Series("iteration", costs.phases.wall / iterations, whole)}
    for name in names:
        mean = getattr(costs.phases, name) / iterations
        found[phase_name(name)] = Series("phase", mean, _usable(seconds[name], each))
    for cause in WAITS:
        waited = seconds_waited(costs, cause) - seconds_waited(costs, cause, "iterations")
        found[f"{WAITING[cause]}{OUTSIDE}"] = Series("wait", waited / iterations, None)
    for key, handler in by_key(costs).items():
        kind: Kind = "handler" if handler.in_iteration else "outside"
        mean = own_seconds(handler, costs.phases) / iterations
        found[key] = Series(kind, mean, _handler_points(handler, seconds, each))
    return found


def _handler_points(handler: HandlerCost, seconds: dict[str, Points], each: int) -> Points | None:
    groups = seconds[PHASES[0]].shape[1] // HANDLER_POINT
    if len(handler.trend) < groups:  # not all calls were clocked, or an older version wrote the file
        return None
    own = np.array([handler.trend[:groups]], np.float64)
    for phase in handler.includes:
        own -= seconds[phase][:, : groups * HANDLER_POINT].reshape(1, groups, HANDLER_POINT).sum(axis=2)
    return _usable(own, each * HANDLER_POINT)


def _usable(seconds: Points, iterations: int) -> Points | None:
    """Return those times (seconds per iteration, by point) that follow the warm-up; None if too few."""
    points = seconds[:, ceil(seconds.shape[1] * WARM_UP) :]
    return points / iterations if points.shape[1] >= LEAST_POINTS else None
