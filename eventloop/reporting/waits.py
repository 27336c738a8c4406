"""Sum up the waits of the training thread by their cause, and by the part of the run that has them."""

from __future__ import annotations

from eventloop.costs.records import WAITS, Cause, Place, RunCosts
from eventloop.util.formatting import duration, share

PLACES: dict[Place, str] = {
    "iterations": "in iterations",
    "evaluations": "in evaluations",
    "between": "between epochs",
    "end": "at the end",
}
"""The parts of a run, with their names in reports."""


def seconds_waited(costs: RunCosts, cause: Cause | None = None, place: Place | None = None) -> float:
    """Return the seconds of all waits of a cause in one part of the run.

    Args:
        cause: the cause; None for all causes.
        place: the part of the run; None for the whole run.
    """
    return sum(w.seconds for w in costs.waits if cause in (None, w.cause) and place in (None, w.place))


def waits_by_cause(costs: RunCosts) -> dict[Cause, float]:
    """Return the seconds of the waits by cause, for each cause that has waits."""
    return {cause: seconds for cause in WAITS if (seconds := seconds_waited(costs, cause))}


def wait_text(costs: RunCosts, cause: Cause, whole: float) -> str:
    """Return the seconds of the waits of a cause as text, with their share of the run and of its parts.

    Args:
        whole: the seconds of the run; 0.0 if they are unknown.
    """
    by_place = {place: seconds_waited(costs, cause, place) for place in PLACES}
    places = ", ".join(
        f"{duration(seconds)} {PLACES[place]}" for place, seconds in by_place.items() if seconds
    )
    in_all = seconds_waited(costs, cause)
    of_run = f", {share(in_all, whole)} of the run" if whole else ""
    return f"{duration(in_all)}{of_run}: {places}"


def longest_wait(costs: RunCosts, place: Place) -> float:
    """Return the seconds of the longest wait in one part of the run."""
    return max((wait.longest for wait in costs.waits if wait.place == place), default=0.0)


def run_seconds(costs: RunCosts) -> float:
    """Return the seconds of the run; if they are unknown, the seconds of its iterations."""
    return costs.seconds or costs.phases.wall
