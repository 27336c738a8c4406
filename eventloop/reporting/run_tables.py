"""Make the tables of a report on one run, each from a function for each column."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from eventloop.commands.messages import Applied
from eventloop.costs.records import WAITING, HandlerCost, Phases, RunCosts, SubscriberCost, Times, phase_names
from eventloop.costs.shares import own_seconds
from eventloop.costs.step_clock import TIMES
from eventloop.costs.trend import medians, trend
from eventloop.reporting.begun import options_table
from eventloop.reporting.curves import Curve
from eventloop.reporting.facts import ESTIMATED, OUTSIDE_HANDLERS, lossy, outside_handlers
from eventloop.reporting.report import Report
from eventloop.reporting.tables import Column, Table, cells
from eventloop.reporting.waits import PLACES, run_seconds
from eventloop.util.formatting import ABSENT, duration, on_a_line, share, three_digits, value_text

MATTERS = 0.01
"""The share of a run from which a handler has a row, and a difference between runs its ratio."""
BUILT_IN = 0.05
"""The share of the iterations, 0..1, below which eventloop's own handlers share a row."""
ALL_RANKS = 8
"""The largest number of ranks for which each rank has a column."""
IN_IT = " in it)"
"""The end of a handler's displayed name if its time includes that of phases, such as backward."""

RANKS, WAITS_TITLE, INSIDE = "Step time of all ranks", "Waits", "Handlers"
OUTSIDE, COMMANDS = "Handlers outside of the iterations", "Commands"
OVER = "its p99 went over its budget, as slow_handler said"
NOT_ALL = "it did not get, or did not manage, all of its events"
NOT_FINITE = "not all of its values are finite"
MEANS = (
    "µs/iteration and share are of all iterations; a call (its mean), p50, p99 and max are of single calls."
)
GUESSED = "~: estimated, because in a tight loop only some events are clocked; p50, p99 and max are of those."
MEDIAN = (
    "The median is over {}: what is long but rare is in the mean alone. Medians need not add up to that of "
    "all."
)
WAIT = (
    "In events; backlog is the longest queue there was. Wait is from the emit of an event to the begin of "
    "its delivery: 0.1 to 0.2 s are normal, because events are collected in batches."
)
APART = "No handler, evaluation or other phase includes these times."
DISCOUNTED = (
    "Means over all iterations. What a rank takes longer in a phase is a wait as far as it was ahead of "
    "the last one; the phases are without it."
)
INSIDE_FIRST = ("share", "a call", "calls", "µs/iteration", "p99", "budget", "max", "p50", "event")
OUTSIDE_FIRST = ("in all", "calls", "a call", "budget", "max", "event")
SUBSCRIBERS_FIRST = ("delivered", "dropped", "failed", "left", "backlog", "busy in all", "busy p50", "budget")
COUNTS = {"delivered": "delivered", "dropped": "dropped", "failed": "failed", "left": "queued"}
COUNTS |= {"backlog": "peak_queued", "spilled": "spilled"}
"""The fields of `SubscriberCost` that count events, by the column that shows them."""


def run_tables(report: Report) -> list[Table]:
    """Return all tables of one run that have rows."""
    costs, log = report.costs, report.log
    found = []
    if costs is not None:
        found += [phases_table(costs), ranks_table(report), waits_table(costs), handlers_table(costs)]
        found += [handlers_table(costs, inside=False), subscribers_table(costs)]
    if log is not None:
        found.append(curves_table(log.curves))
    found += [commands_table(report.commands), options_table(report.begun)]
    return [table for table in found if table.rows]


def commands_table(commands: Sequence[Applied]) -> Table:
    """Return the table of the commands that were applied to a run, in their order."""
    columns: list[Column] = [
        ("command", lambda each: each.command),
        ("arguments", lambda each: " ".join([*each.words, *(f"{k}={v}" for k, v in each.arguments.items())])),
        ("from", lambda each: each.source),
        ("iteration", lambda each: f"{each.iter:,}"),
    ]
    return Table(COMMANDS, *cells(commands, columns), left=3)


def phases_table(costs: RunCosts, least: float = 0.0) -> Table:
    """Return the table of an iteration's phases and their trend; it has no rows without any iteration.

    Args:
        least: the share of the iterations from which a phase has a row; 0.0 adds a row for all phases.
    """
    phases, usual, device = costs.phases, medians(costs), costs.device or Phases()
    columns: list[Column] = [
        ("phase", phase_name),
        ("mean ms", lambda phase: _mean(getattr(phases, phase), phases, 1e3)),
        ("share", lambda phase: share(getattr(phases, phase), phases.wall)),
    ]
    notes = []
    if device.iterations:
        notes.append("ms of an iteration; device: its own mean time.")
    if usual:
        stretch = costs.trend[0].phases.iterations
        columns.append(("median ms", lambda phase: three_digits(usual[phase] * 1e3)))
        columns.append(("share", lambda phase: share(usual[phase], usual["wall"])))
        of = "the single iterations" if stretch == 1 else f"the means of {stretch:,} iterations each"
        notes.append(MEDIAN.format(of))
    if device.iterations:
        columns.append(("device ms", lambda phase: _mean(getattr(device, phase), device, 1e3, zero=ABSENT)))
    names = phase_names(phases) if phases.iterations else ()
    rows = [name for name in names if not least or getattr(phases, name) >= least * phases.wall]
    rows += ["wall"] if names and not least else []
    lines = [trend(costs, phase) for phase in rows]
    return Table("Step time", *cells(rows, columns), lines=lines, note="\n".join(notes))


def ranks_table(report: Report) -> Table:
    """Return the table of the phases on all ranks; it has no rows if there is only one rank."""
    ranks, slow = report.ranks, report.slow_rank
    columns: list[Column] = [
        ("phase, ms/iteration", lambda row: phase_name(row[0])),
        ("min", lambda row: three_digits(min(row[1]) * 1e3)),
        ("median", lambda row: three_digits(median(row[1]) * 1e3)),
        ("max", lambda row: three_digits(max(row[1]) * 1e3)),
        ("min on", lambda row: f"rank {ranks[row[1].index(min(row[1]))].rank}"),
        ("max on", lambda row: f"rank {ranks[row[1].index(max(row[1]))].rank}"),
    ]
    phases = ranks[0].own if ranks else ()
    rows = [(phase, [each.own[phase] for each in ranks]) for phase in phases]
    rows += [("ranks", [each.waited for each in ranks])] if ranks else []
    bad = frozenset(i for i, (phase, _) in enumerate(rows) if slow is not None and phase == slow.phase)
    why = f"rank {slow.rank} is slow in this phase" if slow is not None else ""
    header, texts = cells(rows, columns)
    if len(ranks) <= ALL_RANKS:
        header += [f"rank {each.rank}" for each in ranks]
        texts = [
            row + [three_digits(s * 1e3) for s in each] for row, (_, each) in zip(texts, rows, strict=True)
        ]
    return Table(RANKS, header, texts, bad=bad, why=why, note=DISCOUNTED if rows else "")


def waits_table(costs: RunCosts) -> Table:
    """Return the table of the waits: a row for each cause, part of the run and name."""
    columns: list[Column] = [
        ("cause", lambda wait: WAITING[wait.cause]),
        ("where", lambda wait: PLACES[wait.place]),
        ("for", lambda wait: wait.name),
        ("in all", lambda wait: duration(wait.seconds)),
        ("of the run", lambda wait: share(wait.seconds, costs.seconds)),
        ("waits", lambda wait: f"{wait.calls:,}"),
        ("longest", lambda wait: duration(wait.longest)),
    ]
    return Table(WAITS_TITLE, *cells(costs.waits, columns), left=3, note=APART)


def subscribers_table(costs: RunCosts) -> Table:
    """Return the table of the background subscribers: their events, waits and deliveries."""
    shown = costs.subscribers
    columns: list[Column] = [
        ("subscriber", lambda s: s.name),
        ("event", lambda s: _some_events(s.event)),
        ("runs on", lambda s: s.runs_on),
        *((name, lambda s, field=field: f"{getattr(s, field):,}") for name, field in COUNTS.items()),
        ("wait p50", lambda s: _time(s.wait, s.wait.p50)),
        ("p99", lambda s: _time(s.wait, s.wait.p99)),
        ("busy p50", lambda s: _time(s.busy, s.busy.p50)),
        ("p99", lambda s: _time(s.busy, s.busy.p99)),
        ("busy in all", lambda s: duration(s.seconds)),
        *_budgets(shown),
    ]
    lost, over = frozenset(i for i, s in enumerate(shown) if lossy(s, costs)), _over(shown)
    why = "; or ".join(reason for reason, found in ((NOT_ALL, lost), (OVER, over)) if found)
    note = "\n".join([WAIT, *(on_a_line(f"{s.name}: {s.error}") for s in shown if s.error)])
    table = Table("Background subscribers", *cells(shown, columns), left=3, note=note)
    return table._replace(bad=lost | over, why=why, first=SUBSCRIBERS_FIRST)


def curves_table(curves: Sequence[Curve]) -> Table:
    """Return the table of the logged scalars, a row for each scalar and mode."""
    columns: list[Column] = [
        ("scalar", lambda curve: with_unit(curve.name)),
        ("mode", lambda curve: curve.mode),
        ("records", lambda curve: f"{curve.count:,}"),
        ("first", lambda curve: value_text(curve.first)),
        ("last", lambda curve: value_text(curve.last)),
        ("least", lambda curve: value_text(curve.least)),
        ("at", lambda curve: _step(curve.least_step)),
        ("greatest", lambda curve: value_text(curve.greatest)),
        ("at", lambda curve: _step(curve.greatest_step)),
    ]
    bad = {i: curve for i, curve in enumerate(curves) if curve.not_finite}
    notes = [
        f"{curve.mode}/{curve.name}: {curve.not_finite:,} of {curve.count:,} values are NaN or infinite, "
        f"the first at step {_step(curve.first_not_finite)}"
        for curve in bad.values()
    ]
    table = Table("Scalars", *cells(curves, columns), left=2, lines=[curve.mean for curve in curves])
    return table._replace(bad=frozenset(bad), why=NOT_FINITE, note="\n".join(notes))


def phase_name(phase: str) -> str:
    """Return the name of a phase in tables; that of all phases together is "all"."""
    return "all" if phase == "wall" else WAITING.get(phase, phase)


def with_unit(name: str) -> str:
    """Return a scalar's name with its unit, if the unit is known."""
    return f"{name}, s" if name in TIMES else name


def _mean(seconds: float, phases: Phases, unit: float, zero: str = "") -> str:
    """Format the mean time per iteration, where `seconds` is the sum over all iterations."""
    if not phases.iterations or (zero and not seconds):
        return zero or ABSENT
    return three_digits(seconds / phases.iterations * unit)


def _time(times: Times, seconds: float) -> str:
    return duration(seconds) if times.samples else ABSENT


def _step(number: int | None) -> str:
    return ABSENT if number is None else f"{number:,}"


def _some_events(names: str) -> str:
    """Return the first of several event names, and the number of the others."""
    first, *others = names.split(", ")
    return f"{first} and {len(others)} more" if others else first


def _budgets(costs: Iterable[HandlerCost | SubscriberCost]) -> list[Column]:
    """Return the column of budgets (limits of p99); [] if nothing has a budget."""
    if all(cost.budget is None for cost in costs):
        return []
    return [("budget", lambda cost: ABSENT if cost.budget is None else duration(cost.budget))]


def _over(costs: Iterable[HandlerCost | SubscriberCost]) -> frozenset[int]:
    return frozenset(i for i, cost in enumerate(costs) if cost.over_budget)


# --- handlers ----------------------------------------------------------------------------------------------


class Folded(NamedTuple):
    """The handlers of a table: those shown as rows, and the built-in and small ones that share a line."""

    shown: list[HandlerCost]
    built_in: list[HandlerCost]
    small: list[HandlerCost]


def fold(costs: RunCosts, *, inside: bool) -> Folded:
    """Sort the called handlers into those with a row of their own and those that share a line.

    Args:
        inside: True for the handlers called in iterations, False for all others.
    """
    whole = costs.phases.wall if inside else run_seconds(costs)
    folded = Folded([], [], [])
    for cost in called_handlers(costs, inside=inside):
        least = BUILT_IN if cost.built_in else MATTERS
        matters = cost.over_budget or own_seconds(cost, costs.phases) >= least * whole
        (folded.shown if matters else folded.built_in if cost.built_in else folded.small).append(cost)
    return folded


def handlers_table(
    costs: RunCosts, shown: Sequence[HandlerCost] | None = None, *, inside: bool = True, least: float = 0.0
) -> Table:
    """Return the table of the handlers called in iterations, or of the others, the most expensive first.

    Args:
        shown: the handlers to show; None means all that were called.
        inside: True for the handlers called in iterations, False for all others.
        least: the share of the iterations from which the time outside of handlers has a row.
    """
    shown = called_handlers(costs, inside=inside) if shown is None else shown
    phases = costs.phases
    columns: list[Column] = [
        ("handler", with_includes),
        ("event", lambda h: h.event),
        ("filter", lambda h: h.filter),
        ("priority", lambda h: str(h.priority)),
        ("calls", lambda h: f"{h.calls:,}"),
    ]
    if inside:
        columns += [
            ("µs/iteration", lambda h: ABSENT if h.calls == 1 else _mark(h) + _mean(h.seconds, phases, 1e6)),
            ("share", lambda h: f"{h.share * 100:.2f} %" if phases.iterations else ABSENT),
            ("a call", lambda h: duration(h.seconds / h.calls)),
            ("p50", lambda h: _time(h.times, h.times.p50)),
            ("p99", lambda h: _time(h.times, h.times.p99)),
        ]
    else:
        columns.append(("in all", lambda h: duration(h.seconds)))
        columns.append(("a call", lambda h: duration(h.seconds / h.calls)))
    columns += [("max", lambda h: _time(h.times, h.times.max)), *_budgets(shown)]
    table = Table(INSIDE if inside else OUTSIDE, *cells(shown, columns), left=3, bad=_over(shown), why=OVER)
    if not inside:
        return table._replace(first=OUTSIDE_FIRST)
    guessed = GUESSED if any(handler.estimated for handler in shown) else ""
    note = "\n".join(filter(None, [MEANS, guessed, never_called(costs)]))
    table = table._replace(note=note, first=INSIDE_FIRST)
    if (rest := outside_handlers(costs.handlers, phases)) > least * phases.wall:
        row = _sum_row(table, OUTSIDE_HANDLERS, rest, phases)
        table = table._replace(rows=[row, *table.rows], bad=frozenset(i + 1 for i in table.bad))
    return table


def folded_table(costs: RunCosts, most: int, *, inside: bool, least: float = MATTERS) -> Table:
    """Return the table of at most `most` handlers with a row of their own, and a last row for all others.

    The times in the last row are counted without the phases that the handlers run.
    """
    shown, built_in, small = fold(costs, inside=inside)
    counts = {"more": shown[most:], "built-in": built_in, f"below {MATTERS:.0%}": small}
    others = [cost for members in counts.values() for cost in members]
    table = handlers_table(costs, shown[:most], inside=inside, least=least)
    if others:
        name = ", ".join(f"{len(members):,} {what}" for what, members in counts.items() if members)
        seconds = sum(own_seconds(cost, costs.phases) for cost in others)
        row = _sum_row(table, name, seconds, costs.phases, sum(cost.calls for cost in others))
        table.rows.append(row)
    return table


def _sum_row(table: Table, name: str, seconds: float, phases: Phases, calls: int | None = None) -> list[str]:
    """Return the row of several handlers, in which figures of single calls are "-"."""
    sums = {
        "calls": _step(calls),
        "µs/iteration": _mean(seconds, phases, 1e6) if phases.wall else ABSENT,
        "share": f"{seconds / phases.wall * 100:.2f} %" if phases.wall else ABSENT,
        "in all": duration(seconds),
    }
    single = {column: ABSENT for column in table.first if column in table.header[table.left :]}
    return [name, *((single | sums).get(column, "") for column in table.header[1:])]


def _mark(handler: HandlerCost) -> str:
    return ESTIMATED if handler.estimated else ""


def called_handlers(costs: RunCosts, *, inside: bool | None = None) -> list[HandlerCost]:
    """Return the handlers that were called, the most expensive first.

    Args:
        inside: True for the handlers called in iterations, False for all others, None for both.
    """
    found = [h for h in costs.handlers if h.calls and inside in (None, h.in_iteration)]
    return sorted(found, key=lambda handler: -handler.seconds)


def with_includes(handler: HandlerCost, name: str = "") -> str:
    """Return a handler's name followed by the phases that its time includes."""
    name = name or handler.name
    return f"{name} ({', '.join(handler.includes)}{IN_IT}" if handler.includes else name


def by_key(costs: RunCosts, *, inside: bool | None = None) -> dict[str, HandlerCost]:
    """Return the called handlers by a key of name, event and filter, the most expensive first.

    The key identifies a handler in several runs. Handlers with equal keys are distinguished by their order.
    """
    found: dict[str, HandlerCost] = {}
    for handler in called_handlers(costs, inside=inside):
        key = _key(handler)
        while key in found:
            key += "'"
        found[key] = handler
    return found


def _key(handler: HandlerCost) -> str:
    key = handler.name
    if not key.endswith(f".{handler.event}"):  # a hook's method mostly has the name of its event
        key += f", {handler.event}"
    return f"{key} [{handler.filter}]" if handler.filter else key


def never_called(costs: RunCosts) -> str:
    """Return a note that names the handlers that were never called; "" if all were."""
    names = [_key(handler) for handler in costs.handlers if not handler.calls]
    if not names:
        return ""
    subject = "1 handler was" if len(names) == 1 else f"{len(names):,} handlers were"
    return f"{subject} never called: {'; '.join(names)}."
