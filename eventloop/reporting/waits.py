"""Sum up the waits of a run by cause and by the part of the run that has them."""

from __future__ import annotations

from eventloop.costs.records import WAITS, Cause, Place, RunCosts
from eventloop.util.formatting import duration, share

PLACES: dict[Place, str] = {
    "iterations": "in iterations",
    "evaluations": "in evaluations",
    "between": "between epochs",
    "end": "at the end",
}
"""The parts of a run as reports name them."""


def seconds_waited(costs: RunCosts, cause: Cause | None = None, place: Place | None = None) -> float:
    """Return the seconds of the waits of a cause, in one part of the run; None stands for all."""
    return sum(w.seconds for w in costs.waits if cause in (None, w.cause) and place in (None, w.place))


def waits_by_cause(costs: RunCosts) -> dict[Cause, float]:
    """Return the seconds of the waits of each cause that has any."""
    return {cause: seconds for cause in WAITS if (seconds := seconds_waited(costs, cause))}


def wait_text(costs: RunCosts, cause: Cause, whole: float) -> str:
    """Return the seconds waited for a cause, their share of the run and the parts of the run that have them.

    Args:
        whole: the seconds of the run; 0.0 if they are unknown.
    """
    places = {place: seconds_waited(costs, cause, place) for place in PLACES}
    parts = ", ".join(f"{duration(seconds)} {PLACES[place]}" for place, seconds in places.items() if seconds)
    seconds = seconds_waited(costs, cause)
    return f"{duration(seconds)}{f', {share(seconds, whole)} of the run' if whole else ''}: {parts}"


def longest_wait(costs: RunCosts, place: Place) -> float:
    """Return the seconds of the longest wait in one part of the run."""
    return max((wait.longest for wait in costs.waits if wait.place == place), default=0.0)


def run_seconds(costs: RunCosts) -> float:
    """Return the seconds of the run, or of its iterations if those of the run are unknown."""
    return costs.seconds or costs.phases.wall
