"""Take the seconds an iteration of each phase and handler from a cost record, point by point of its trend."""

from __future__ import annotations

from math import ceil
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eventloop.costs.records import HANDLER_POINT, PHASES, HandlerCost, Phases, RunCosts
from eventloop.reporting.tables import by_key

WARM_UP = 0.1
"""The part of the points, from the first one on, that is left out: compilation and caches come there."""
LEAST_POINTS = 10
"""The points after the warm-up below which nothing is known about their scatter."""
LEAST_ITERATIONS = 12
"""The iterations of a run that has as many: each of its first 512 is a point."""

Kind = Literal["iteration", "phase", "handler", "outside"]
"""`outside` is a handler of an event outside of the iterations, which has no points."""
Points = NDArray[np.float64]
ITERATION = "an iteration"


class Series(NamedTuple):
    """The seconds an iteration of a phase or a handler."""

    kind: Kind
    mean: float
    """Over the whole run."""
    points: Points | None
    """Of shape (parts, points), for equal numbers of iterations, without the warm-up; None if they are not
    known or too few. The parts of an iteration are its phases.
    """


def series_of(costs: RunCosts) -> dict[str, Series]:
    """Return the series of the whole iteration, of each phase and of each called handler, by name.

    A handler that runs phases, such as the optimizer's, is without them.
    """
    phases = _whole_points(costs)
    each, iterations = phases[0].iterations if phases else 0, max(1, costs.phases.iterations)
    seconds = {phase: _of(phases, phase) for phase in PHASES}
    whole = _usable(np.concatenate([*seconds.values()]), each)
    found = {ITERATION: Series("iteration", costs.phases.wall / iterations, whole)}
    for phase in PHASES:
        mean = getattr(costs.phases, phase) / iterations
        found[phase] = Series("phase", mean, _usable(seconds[phase], each))
    for key, handler in by_key(costs.handlers).items():
        own = handler.seconds - sum(getattr(costs.phases, phase) for phase in handler.includes)
        kind: Kind = "handler" if handler.in_iteration else "outside"
        found[key] = Series(kind, own / iterations, _handler_points(handler, seconds, each))
    return found


def _whole_points(costs: RunCosts) -> list[Phases]:
    """Return the points of the trend but for a last one that has fewer iterations than the others."""
    points = [point.phases for point in costs.trend if point.phases.iterations]
    return [point for point in points if point.iterations == points[0].iterations]


def _of(phases: list[Phases], phase: str) -> Points:
    return np.array([[getattr(point, phase) for point in phases]], np.float64)


def _handler_points(handler: HandlerCost, seconds: dict[str, Points], each: int) -> Points | None:
    groups = seconds[PHASES[0]].shape[1] // HANDLER_POINT
    if len(handler.trend) < groups:  # its calls were not all clocked, or an older version wrote the file
        return None
    own = np.array([handler.trend[:groups]], np.float64)
    for phase in handler.includes:
        own -= seconds[phase][:, : groups * HANDLER_POINT].reshape(1, groups, HANDLER_POINT).sum(axis=2)
    return _usable(own, each * HANDLER_POINT)


def _usable(seconds: Points, iterations: int) -> Points | None:
    """Return the seconds an iteration of the points after the warm-up, or None if they are too few."""
    points = seconds[:, ceil(seconds.shape[1] * WARM_UP) :]
    return points / iterations if points.shape[1] >= LEAST_POINTS else None
