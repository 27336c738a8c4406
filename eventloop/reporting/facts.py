"""What a person wants to know first of a run: its name, some numbers, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from eventloop.costs.records import PHASES, Phases, RunCosts, SubscriberCost
from eventloop.reporting.report import Report, outdated
from eventloop.util.formatting import duration, share, three_digits


class Fact(NamedTuple):
    """A number and its name."""

    name: str
    value: str
    bad: bool = False
    """Somebody should look at it."""


def labels(reports: Sequence[Report]) -> list[str]:
    """A short name for each run: its directory's, or as much of the path as tells them apart."""
    paths = [Path(report.run).resolve().parts for report in reports]
    for length in range(1, max(map(len, paths)) + 1):
        short = ["/".join(parts[-length:]) for parts in paths]
        if len(set(short)) == len(set(paths)):
            break
    seen: list[str] = []
    for name in short:
        number = sum(1 for other in short[: len(seen)] if other == name)
        seen.append(f"{name} ({number + 1})" if number else name)
    return seen


def facts(report: Report) -> list[Fact]:
    """The numbers of a run, the first one first."""
    costs, log = report.costs, report.log
    found = []
    if costs is not None:
        found += [*_took(costs), *_of_iterations(costs), *_of_events(costs)]
    elif log is not None and log.curves:
        found.append(Fact("logged up to iteration", f"{max(curve.last_step for curve in log.curves):,}"))
    found.append(Fact("state", state(report), bad=state(report).startswith("error")))
    return found


def state(report: Report) -> str:
    """`completed`, `error: ...`, another reason to stop, or `under way or killed`."""
    if report.log is not None and report.log.ended is not None:
        return report.log.ended
    if report.costs is None or not report.costs.complete or outdated(report.costs, report.log):
        return "under way or killed"
    return report.costs.outcome or "ended"


def trend(costs: RunCosts, phase: str) -> list[float]:
    """Seconds an iteration, one number a point of the trend."""
    return [
        getattr(point.phases, phase) / point.phases.iterations
        for point in costs.trend
        if point.phases.iterations
    ]


def medians(costs: RunCosts) -> Phases | None:
    """A usual iteration: each phase's median over the points of the trend; None where there is no trend."""
    if not any(point.phases.iterations for point in costs.trend):
        return None
    return Phases(iterations=1, **{phase: median(trend(costs, phase)) for phase in PHASES})


def usual_wall(costs: RunCosts) -> float:
    """The median of the whole iterations, which those of the phases do not quite add up to."""
    return median(trend(costs, "wall"))


def lossy(subscriber: SubscriberCost, costs: RunCosts) -> bool:
    """Whether it did not get, or did not manage, everything. What a run under way has in its queues it may yet get."""
    left = subscriber.queued if costs.complete else 0
    return bool(subscriber.dropped or subscriber.failed or left or subscriber.error)


def _took(costs: RunCosts) -> list[Fact]:
    if not costs.seconds:
        return []
    parts = [("training iterations", costs.phases.wall), ("evaluation", costs.evaluation)]
    told = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts if seconds)
    return [Fact("took", f"{duration(costs.seconds)}{f', of it {told}' if told else ''}")]


def _of_iterations(costs: RunCosts) -> list[Fact]:
    """Of a usual one, and beside it the mean, which a single long one may have made."""
    phases = costs.phases
    found = [Fact("iterations", f"{phases.iterations:,}")]
    if not (phases.iterations and phases.wall):
        return found
    usual, mean = medians(costs), duration(phases.wall / phases.iterations)
    if usual is None:
        found.append(Fact("an iteration, mean", mean))
    else:
        found.append(Fact("an iteration, median", f"{duration(usual_wall(costs))} (mean {mean})"))
    found.append(Fact("iterations a second", three_digits(phases.iterations / phases.wall)))
    for name, phase in (("of it hooks", "hooks"), ("of it waiting for data", "data")):
        of_all = share(getattr(phases, phase), phases.wall)
        if usual is None:
            found.append(Fact(f"{name}, mean", of_all))
        else:
            of_usual = share(getattr(usual, phase), usual_wall(costs))
            found.append(Fact(f"{name}, median", f"{of_usual} (mean {of_all})"))
    return found


def _of_events(costs: RunCosts) -> list[Fact]:
    """How many of them the background did not get to its subscribers."""
    if not costs.subscribers:
        return []
    counts = {
        "dropped": sum(s.dropped for s in costs.subscribers),
        "failed": sum(s.failed for s in costs.subscribers),
        "left" if costs.complete else "waiting": sum(s.queued for s in costs.subscribers),
    }
    told = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    bad = any(count for name, count in counts.items() if name != "waiting")
    return [Fact("events not delivered", told or "0", bad)]
