"""Compute the seconds of phases over the course of a run, and those of a usual iteration.

The `trend` of a cost record holds the phases at successive points of the run, each the sum over equally many
iterations. Reports use these functions.
"""

from __future__ import annotations

from statistics import median

from eventloop.costs.records import PHASES, WAITS, RunCosts


def trend(costs: RunCosts, phase: str) -> list[float]:
    """Return the mean seconds of a phase in an iteration, for each point of the trend."""
    return [
        getattr(point.phases, phase) / point.phases.iterations
        for point in costs.trend
        if point.phases.iterations
    ]


def medians(costs: RunCosts) -> dict[str, float]:
    """Return the median seconds of each phase over the points of the trend, with "wall" for whole iterations.

    It is empty without points. The medians of the phases need not add up to that of "wall".
    """
    return {phase: usual(costs, phase) for phase in (*PHASES, *WAITS, "wall")} if trend(costs, "wall") else {}


def usual(costs: RunCosts, phase: str) -> float:
    """Return the median seconds of a phase over the points of the trend, which must not be empty."""
    return median(trend(costs, phase))
