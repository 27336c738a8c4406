"""Compute the mean seconds of phases over the course of a run, and the medians of these, for reports.

The `trend` of a cost record divides the run into points of equally many iterations. Each point has the
phases, summed over its iterations.
"""

from __future__ import annotations

from statistics import median

from eventloop.costs.records import PHASES, WAITS, RunCosts


def trend(costs: RunCosts, phase: str) -> list[float]:
    """Return, for each point of the trend, the mean seconds of a phase in one iteration."""
    return [
        getattr(point.phases, phase) / point.phases.iterations
        for point in costs.trend
        if point.phases.iterations
    ]


def medians(costs: RunCosts) -> dict[str, float]:
    """Return the median seconds of each phase over the points of the trend.

    The key "wall" stands for whole iterations; the medians of the phases need not add up to its value. The
    mapping is empty if the trend has no points.
    """
    if not trend(costs, "wall"):
        return {}
    return {phase: usual(costs, phase) for phase in (*PHASES, *WAITS, "wall")}


def usual(costs: RunCosts, phase: str) -> float:
    """Return the median seconds of a phase in an iteration over the points of the trend.

    Raises:
        StatisticsError: the trend is empty.
    """
    return median(trend(costs, phase))
