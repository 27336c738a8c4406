"""Follow the phases of an iteration over a run, and find those of a usual iteration."""

from __future__ import annotations

from statistics import median

from eventloop.costs.records import PHASES, RunCosts


def trend(costs: RunCosts, phase: str) -> list[float]:
    """Return the mean seconds of a phase an iteration, for each point of the trend."""
    return [
        getattr(point.phases, phase) / point.phases.iterations
        for point in costs.trend
        if point.phases.iterations
    ]


def medians(costs: RunCosts) -> dict[str, float]:
    """Return the median seconds of each phase and of "wall" over the points of the trend; {} without one.

    That of whole iterations need not be the sum of the others.
    """
    return {phase: usual(costs, phase) for phase in (*PHASES, "wall")} if trend(costs, "wall") else {}


def usual(costs: RunCosts, phase: str) -> float:
    """Return the median seconds of a phase over the points of the trend, which has at least one."""
    return median(trend(costs, phase))
