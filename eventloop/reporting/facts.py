"""Collect the facts at the head of a report: durations, iterations, memory, lost events, and the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eventloop.costs.records import (
    IN_ITERATION,
    PHASES,
    WAITING,
    WAITS,
    HandlerCost,
    Memory,
    Phases,
    RunCosts,
    SubscriberCost,
)
from eventloop.costs.trend import medians
from eventloop.reporting.report import Report, outdated
from eventloop.reporting.waits import wait_text, waits_by_cause
from eventloop.util.formatting import duration, memory_size, three_digits

OUTSIDE_HANDLERS = "(outside of handlers)"
"""The name of the row for the time of the hooks phase that no handler took."""
_OUTERMOST = frozenset({"before_train_iter", "after_train_iter"})
"""The events of an iteration that the trainer emits outside of any handler.

Other events are emitted within a handler, as `after_backward` is by the optimizer hook, so the optimizer
hook's time includes the time of the handlers of `after_backward`. Callbacks of other engines, whose events
are not in `IN_ITERATION`, are also called outside of any handler.
"""
NEGLIGIBLE = 0.02
"""Times below this share of the run, or of the hooks phase, are not shown as a part of their own."""
ESTIMATED = "~"
"""The mark before an estimated time: only some of the calls were measured."""

RUN_COLOURS = ("#2f6fde", "#d9730d", "#1b9663", "#b8388a", "#7650cf", "#0c8fa3", "#8a5a2b", "#6b7686")
_WORK = ("#d98a1f", "#5b9bea", "#3568b5", "#7a5cc4", "#15967b", "#8e98a6")
_WAITS = ("#b3261e", "#8a6d00", "#5b3b8c")
PHASE_COLOURS = dict(zip((*PHASES, *WAITS), (*_WORK, *_WAITS), strict=True))


class Fact(NamedTuple):
    """Hold a named value at the head of a report."""

    name: str
    value: str
    bad: bool = False
    """Whether the value is highlighted as bad."""


def labels(reports: Sequence[Report]) -> list[str]:
    """Return a short name for each run: as many last parts of its path as distinguish the runs."""
    return labels_of([report.run for report in reports])


def labels_of(runs: Sequence[str]) -> list[str]:
    """Return a short name for each directory: as many last parts of its path as distinguish the directories.

    A directory that is given again gets a number after its name.
    """
    paths = [Path(run).resolve().parts for run in runs]
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
    """Return the facts of a run: how it ended, durations, iterations, memory and undelivered events."""
    costs, log = report.costs, report.log
    collected = [Fact("state", state(report), bad=state(report).startswith("error"))]
    if costs is not None:
        memory = [Fact("peak memory", text)] if (text := memory_text(costs.memory)) else []
        collected += [*_duration_facts(costs), *_iteration_facts(costs), *memory, *_event_facts(costs)]
    elif log is not None and log.curves:
        last_step = max(curve.last_step for curve in log.curves)
        collected.append(Fact("logged up to iteration", f"{last_step:,}"))
    return collected


def state(report: Report) -> str:
    """Return how a run ended: "completed", "error: ...", another reason, or "under way or killed"."""
    if report.log is not None and report.log.ended is not None:
        return report.log.ended
    if report.costs is None or not report.costs.complete or outdated(report.costs, report.log):
        return "under way or killed"
    return report.costs.outcome or "ended"


def lossy(subscriber: SubscriberCost, costs: RunCosts) -> bool:
    """Return whether a background subscriber has lost events or ended with an error.

    In a run under way, queued events are not lost, because they may still be delivered.
    """
    return bool(missed(subscriber, costs) or subscriber.error)


def _duration_facts(costs: RunCosts) -> list[Fact]:
    """Return the duration of the run with its parts, and a fact on each cause with long waits."""
    if not costs.seconds:
        return []
    iterations = costs.phases.wall - sum(getattr(costs.phases, wait) for wait in WAITS)
    parts = {"iterations": iterations, "evaluation": costs.evaluation}
    waits = {cause: s for cause, s in waits_by_cause(costs).items() if s >= NEGLIGIBLE * costs.seconds}
    parts |= {WAITING[cause]: seconds for cause, seconds in waits.items()}
    outside = costs.seconds - sum(parts.values())
    parts["the rest"] = outside if outside >= NEGLIGIBLE * costs.seconds else 0.0
    shares = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items() if seconds)
    took = Fact("took", f"{duration(costs.seconds)}{f': {shares}' if shares else ''}")
    return [took, *(Fact(WAITING[cause], wait_text(costs, cause, costs.seconds)) for cause in waits)]


def _iteration_facts(costs: RunCosts) -> list[Fact]:
    """Return the number of iterations, their rate and their times."""
    phases = costs.phases
    if not (phases.iterations and phases.wall):
        return [Fact("iterations", f"{phases.iterations:,}")]
    rate = three_digits(phases.iterations / phases.wall)
    times = [f"{name} {duration(seconds)}" for name, seconds in step_times(costs).items()]
    return [
        Fact("iterations", f"{phases.iterations:,}, {rate} a second"),
        Fact("an iteration", ", ".join(times)),
    ]


def step_times(costs: RunCosts) -> dict[str, float]:
    """Return the percentiles of the time of an iteration that are known, and its mean, in seconds by name."""
    times, percentiles = costs.iteration, {}
    if times.samples:
        percentiles = {"p50": times.p50, "p90": times.p90, "p99": times.p99}
    elif phase_medians := medians(costs):  # the record is of an older version, without `iteration`
        percentiles = {"p50": phase_medians["wall"]}
    return {**percentiles, "mean": costs.phases.wall / costs.phases.iterations}


def memory_text(memory: Memory) -> str:
    """Return the peak memory of the host and of each device on one line; "" if both are unknown."""
    parts = [] if memory.host is None else [f"host {memory_size(memory.host)}"]
    for device in memory.devices:
        held = memory_size(device.reserved)
        parts.append(f"{device.name} {memory_size(device.allocated)} in tensors, {held} reserved")
    return "; ".join(parts)


def _event_facts(costs: RunCosts) -> list[Fact]:
    """Return the numbers of events that background subscribers dropped or failed on, or that are queued."""
    if not costs.subscribers:
        return []
    counts = {
        "dropped": sum(s.dropped for s in costs.subscribers),
        "failed": sum(s.failed for s in costs.subscribers),
        "left" if costs.complete else "waiting": sum(s.queued for s in costs.subscribers),
    }
    text = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    bad = any(count for name, count in counts.items() if name != "waiting")
    return [Fact("not delivered", text or "0", bad)]


def missed(subscriber: SubscriberCost, costs: RunCosts) -> int:
    """Return the number of events that a subscriber dropped, failed on, or had queued when the run ended."""
    return subscriber.dropped + subscriber.failed + (subscriber.queued if costs.complete else 0)


def outside_handlers(costs: Sequence[HandlerCost], phases: Phases) -> float:
    """Return the seconds of the hooks phase that no handler took; 0.0 if they are at most 2 % of the phase.

    The time of a handler that runs other phases, as the optimizer hook runs "backward", includes these
    phases, which are no part of the hooks phase: they are subtracted. The handlers of events that such a
    handler emits, such as `after_backward`, are not added, because the emitting handler's time includes their
    times.
    """
    outermost = [
        cost
        for cost in costs
        if cost.event in _OUTERMOST or (cost.in_iteration and cost.event not in IN_ITERATION)
    ]
    handlers = sum(cost.seconds for cost in outermost)
    included_phases = {phase for cost in costs for phase in cost.includes}
    outside = phases.hooks - (handlers - sum(getattr(phases, phase) for phase in included_phases))
    return outside if outside > NEGLIGIBLE * phases.hooks else 0.0
