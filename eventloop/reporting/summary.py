"""Summarize a run as text: where the time went, and what each subscriber received."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from eventloop.bus import Bus
from eventloop.bus.subscription import SubscriptionStats
from eventloop.costs.foreign_calls import ForeignCalls
from eventloop.costs.records import PHASES, HandlerCost, Phases, RunCosts
from eventloop.costs.step_clock import StepClock
from eventloop.metrics import EventStorage
from eventloop.reporting.advice import advice
from eventloop.reporting.facts import ESTIMATED, OUTSIDE_HANDLERS, outside_handlers
from eventloop.util.formatting import ABSENT, duration, on_a_line, table

ERROR_WIDTH = 60
"""Characters of an error in a table; the line of its subscriber has the whole error."""
SMALL = 0.001
"""Share of the iterations' time below which handlers of eventloop share a row."""
_HELPERS = frozenset({"TraceWindow"})
"""Classes of eventloop that are not hooks, but are subscribed by a hook."""
NAMES = 10
"""How many metrics with unreadable values are named."""


class MeasuredTrainer(Protocol):
    """The parts of a trainer that its summary shows."""

    bus: Bus
    clock: StepClock
    metrics: EventStorage
    hooks: list[Any]
    foreign_calls: ForeignCalls
    loader: Any


def cost_table(costs: list[HandlerCost], phases: Phases, ours: Collection[str] = ()) -> str:
    """Return two tables of synchronous handlers: those of the iterations, and those outside of them.

    The first has microseconds per iteration, and the share of an iteration. Its first row is the time of the
    hooks phase outside of handlers, unless it is small. The second has the mean of a call, and the sum.

    Args:
        ours: classes whose handlers share a row of a table if they cost next to nothing.
    """
    called = sorted((cost for cost in costs if cost.calls), key=lambda cost: -cost.seconds)
    inside = [cost for cost in called if cost.in_iteration and phases.iterations]
    outside = [cost for cost in called if not (cost.in_iteration and phases.iterations)]
    tables = [_inside_table(inside, phases, ours)] if inside else []
    if outside:
        title = "outside of the iterations" if inside else "handler"
        tables.append(_outside_table(title, outside, phases, ours))
    notes = []
    if any(cost.estimated for cost in called):
        notes.append(f"{ESTIMATED}: estimated, because in a tight loop only some events are clocked")
    if any(_small(own, ours, phases.wall)[1] for own in (inside, outside)):
        notes.append("trainer.costs() and `eventloop report` have every one")
    return "\n\n".join([*tables, *(["\n".join(notes)] if notes else [])])


def _inside_table(costs: list[HandlerCost], phases: Phases, ours: Collection[str]) -> str:
    alone, small = _small(costs, ours, phases.wall)
    rows = [_inside_row(cost.name, cost.event, [cost], phases) for cost in alone]
    if rest := outside_handlers(costs, phases):
        each, share = rest / phases.iterations * 1e6, rest / phases.wall
        rows.insert(0, [OUTSIDE_HANDLERS, "", ABSENT, f"{each:,.1f}", f"{share:.2%}"])
    if small:
        rows.append(_inside_row(_more(small), "", small, phases))
    return table(["handler", "event", "calls", "µs/iteration", "% of it"], rows, right=(2, 3, 4))


def _outside_table(title: str, costs: list[HandlerCost], phases: Phases, ours: Collection[str]) -> str:
    alone, small = _small(costs, ours, phases.wall)
    rows = [_outside_row(cost.name, cost.event, [cost]) for cost in alone]
    if small:
        rows.append(_outside_row(_more(small), "", small))
    return table([title, "event", "calls", "a call", "in all"], rows, right=(2, 3, 4))


def _small(
    costs: list[HandlerCost], ours: Collection[str], wall: float
) -> tuple[list[HandlerCost], list[HandlerCost]]:
    """Return the handlers with a row of their own, and those that share one; a single one does not share."""
    small = [cost for cost in costs if cost.name.partition(".")[0] in ours and cost.seconds < SMALL * wall]
    return ([cost for cost in costs if cost not in small], small) if len(small) > 1 else (costs, [])


def _more(small: Sequence[HandlerCost]) -> str:
    return f"{len(small)} more, each below {SMALL:.1%}"


def _inside_row(name: str, event: str, costs: Sequence[HandlerCost], phases: Phases) -> list[str]:
    per_iteration = _seconds(costs) / phases.iterations * 1e6
    share = f"{sum(cost.share for cost in costs):.2%}"
    return [name, event, f"{_calls(costs):,}", f"{_mark(costs)}{per_iteration:,.1f}", share]


def _outside_row(name: str, event: str, costs: Sequence[HandlerCost]) -> list[str]:
    seconds, calls = _seconds(costs), _calls(costs)
    return [name, event, f"{calls:,}", _mark(costs) + duration(seconds / calls), duration(seconds)]


def _seconds(costs: Sequence[HandlerCost]) -> float:
    return sum(cost.seconds for cost in costs)


def _calls(costs: Sequence[HandlerCost]) -> int:
    return sum(cost.calls for cost in costs)


def _mark(costs: Sequence[HandlerCost]) -> str:
    return ESTIMATED if any(cost.estimated for cost in costs) else ""


def delivery_table(stats: list[SubscriptionStats]) -> str:
    """Return a table of the events that each background subscriber received."""
    rows = [
        [
            s.name,
            s.runs_on,
            *(f"{n:,}" for n in (s.delivered, s.dropped, s.failed, s.queued)),
            f"{s.seconds:.2f}",
            on_a_line(s.error, ERROR_WIDTH),
        ]
        for s in stats
        if s.runs_on != "sync"
    ]
    header = ["subscriber", "runs on", "delivered", "dropped", "failed", "left", "busy s", ""]
    return table(header, rows, right=(2, 3, 4, 5, 6))


def breakdown(trainer: MeasuredTrainer) -> str:
    """Return the shares of the phases in an average iteration, which add up to it."""
    clock = trainer.clock
    if not clock.iterations:
        return "no iteration was trained"
    phases = clock.phases
    shares = ", ".join(f"{name} {getattr(phases, name) / phases.wall:.1%}" for name in PHASES)
    return f"{phases.iterations:,} iterations of {phases.wall / phases.iterations * 1e3:.3f} ms: {shares}"


def run_costs(trainer: MeasuredTrainer, *, complete: bool = False, outcome: str = "") -> RunCosts:
    """Return the record of a run as of now. Call it on the training thread.

    Args:
        complete: whether the run has ended and everything was delivered.
        outcome: how it ended.
    """
    bus, clock = trainer.bus, trainer.clock
    phases = clock.phases
    return RunCosts(
        seconds=clock.run_seconds, evaluation=clock.excluded, outcome=outcome, first_iter=clock.first_iter,
        phases=phases, trend=clock.trend,
        device=clock.device.phases if clock.device is not None and clock.device.samples else None,
        iteration=clock.times.times(), num_workers=getattr(trainer.loader, "num_workers", None),
        handlers=[*bus.handler_costs(phases.wall), *trainer.foreign_calls.costs(phases.wall)],
        subscribers=bus.subscriber_costs(), complete=complete,
    )  # fmt: skip


def summarize(trainer: MeasuredTrainer) -> str:
    """Return the summary of `trainer.summary()` as text."""
    stats, costs = trainer.bus.stats(), run_costs(trainer, complete=trainer.bus.closed)
    blocks = (
        ["\n".join(["what to do:", *(f"  {line}" for line in lines)])] if (lines := advice(costs)) else []
    )
    blocks += [breakdown(trainer), cost_table(costs.handlers, costs.phases, _ours(trainer))]
    if any(s.runs_on != "sync" for s in stats):
        blocks.append(delivery_table(stats))
    losses = shortfalls(stats) + _unread(dict(trainer.metrics.unreadable))
    if losses:
        blocks.append("\n".join(["not everything was delivered:", *(f"  {line}" for line in losses)]))
    return "\n\n".join(blocks)


def _ours(trainer: MeasuredTrainer) -> frozenset[str]:
    """Return the names of eventloop's classes among the trainer's hooks, as handlers show them."""
    classes = {type(hook) for hook in trainer.hooks}
    own = {cls for cls in classes if not cls.__module__.startswith("eventloop.")}
    return (_HELPERS | {cls.__qualname__ for cls in classes - own}) - {cls.__qualname__ for cls in own}


def _unread(values: dict[str, int]) -> list[str]:
    """Return a line on values of metrics that could not be read and were not logged."""
    counts = ", ".join(f"{name} ({count:,})" for name, count in [*values.items()][:NAMES])
    more = f", and {len(values) - NAMES} names more" if len(values) > NAMES else ""
    return [f"metrics: values that could not be read: {counts}{more}"] if values else []


def shortfalls(stats: list[SubscriptionStats]) -> list[str]:
    """Return one line for each background subscriber that lost events."""
    return [text for s in stats if (text := s.shortfall)]
