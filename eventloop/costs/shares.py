"""Compute the shares of data, of hooks and of each handler in the time between two records of a run."""

from __future__ import annotations

from eventloop.costs.records import HandlerCost, Phases, RunCosts

SCALARS = "cost/"
"""The prefix of the names under which `CostsHook(log_seconds=...)` logs shares of time as scalars."""


def own_seconds(cost: HandlerCost, phases: Phases) -> float:
    """Return the seconds of a handler without the phases that it runs, such as "backward"."""
    seconds_of_phases: list[float] = [getattr(phases, phase) for phase in cost.includes]
    return cost.seconds - sum(seconds_of_phases)


def shares_between(before: RunCosts, after: RunCosts) -> dict[str, float]:
    """Return shares, 0..1, of the wall time of the iterations between two records of one run.

    "data_share" and "hooks_share" are the shares of these two phases. Each handler that was called in an
    iteration has a share under its name, summed over its events, without the phases that it runs. The mapping
    is empty if no iteration lies between the records.
    """
    wall = after.phases.wall - before.phases.wall
    if after.phases.iterations == before.phases.iterations or wall <= 0:
        return {}
    shares = {
        "data_share": (after.phases.data - before.phases.data) / wall,
        "hooks_share": (after.phases.hooks - before.phases.hooks) / wall,
    }
    earlier = _seconds_of_handlers(before)
    later = _seconds_of_handlers(after)
    return shares | {name: (seconds - earlier.get(name, 0.0)) / wall for name, seconds in later.items()}


def _seconds_of_handlers(costs: RunCosts) -> dict[str, float]:
    """Return the seconds of each handler in iterations, summed over its events, by name."""
    seconds: dict[str, float] = {}
    for cost in costs.handlers:
        if cost.in_iteration and cost.calls:
            seconds[cost.name] = seconds.get(cost.name, 0.0) + own_seconds(cost, costs.phases)
    return seconds
