"""Make the tables of a report on one run. Each table is defined by a function for each column."""

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
"""Handlers below this part of a run are added up in one row, and differences below it have no ratio."""
BUILT_IN = 0.05
"""eventloop's own handlers are added up in one row if they take less than this part of the iterations."""
ALL_RANKS = 8
"""Each rank has a column in runs of at most this many ranks."""
IN_IT = " in it)"
"""The end of a handler's name in tables if its time includes phases: "NAME (backward in it)"."""

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
"""The fields of `SubscriberCost` that count events, by the names of their columns."""


def run_tables(report: Report) -> list[Table]:
    """Return all tables of one run that have rows."""
    costs, log = report.costs, report.log
    tables = []
    if costs is not None:
        tables += [phases_table(costs), ranks_table(report), waits_table(costs), handlers_table(costs)]
        tables += [handlers_table(costs, inside=False), subscribers_table(costs)]
    if log is not None:
        tables.append(curves_table(log.curves))
    tables += [commands_table(report.commands), options_table(report.begun)]
    return [table for table in tables if table.rows]


def commands_table(commands: Sequence[Applied]) -> Table:
    """Return the table of the commands that were applied to a run, oldest first."""
    columns: list[Column] = [
        ("command", lambda applied: applied.command),
        ("arguments", _arguments),
        ("from", lambda applied: applied.source),
        ("iteration", lambda applied: f"{applied.iter:,}"),
    ]
    return Table(COMMANDS, *cells(commands, columns), left=3)


def _arguments(applied: Applied) -> str:
    named = [f"{name}={value}" for name, value in applied.arguments.items()]
    return " ".join([*applied.words, *named])


def phases_table(costs: RunCosts, least: float = 0.0) -> Table:
    """Return the table of an iteration's phases and their trend; it has no rows if no iteration has ended.

    Args:
        least: phases below this share of the iterations have no row. With 0.0 all have one, and a last row
            "all" is added.
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
    """Return the table of the phases' times on the ranks; it has no rows for a run of one rank."""
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
    rows = [(phase, [times.own[phase] for times in ranks]) for phase in phases]
    rows += [("ranks", [times.waited for times in ranks])] if ranks else []
    bad = frozenset(i for i, (phase, _) in enumerate(rows) if slow is not None and phase == slow.phase)
    why = f"rank {slow.rank} is slow in this phase" if slow is not None else ""
    header, texts = cells(rows, columns)
    if len(ranks) <= ALL_RANKS:
        header += [f"rank {times.rank}" for times in ranks]
        for text, (_, seconds) in zip(texts, rows, strict=True):
            text += [three_digits(s * 1e3) for s in seconds]
    return Table(RANKS, header, texts, bad=bad, why=why, note=DISCOUNTED if rows else "")


def waits_table(costs: RunCosts) -> Table:
    """Return the table of the training thread's waits, a row for each cause, part of the run and name."""
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
    lost, over = frozenset(i for i, s in enumerate(shown) if lossy(s, costs)), _over_budget(shown)
    why = "; or ".join(reason for reason, rows in ((NOT_ALL, lost), (OVER, over)) if rows)
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
    """Return the name of a phase in tables, which is "all" for "wall", the whole iteration."""
    return "all" if phase == "wall" else WAITING.get(phase, phase)


def with_unit(name: str) -> str:
    """Return a scalar's name with its unit, if the unit is known."""
    return f"{name}, s" if name in TIMES else name


def _mean(seconds: float, phases: Phases, unit: float, zero: str = "") -> str:
    """Format `seconds`, the sum over all iterations, as a mean per iteration in a unit (1e3 for ms).

    The text for 0 seconds is `zero`, if that is given.
    """
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
    """Return a list with the column of budgets (limits of p99); [] if none of the items has a budget."""
    if all(cost.budget is None for cost in costs):
        return []
    return [("budget", lambda cost: ABSENT if cost.budget is None else duration(cost.budget))]


def _over_budget(costs: Iterable[HandlerCost | SubscriberCost]) -> frozenset[int]:
    return frozenset(i for i, cost in enumerate(costs) if cost.over_budget)


# --- handlers ----------------------------------------------------------------------------------------------


class Folded(NamedTuple):
    """Hold the handlers with a row of their own, and the built-in and small ones that share a last row."""

    shown: list[HandlerCost]
    built_in: list[HandlerCost]
    small: list[HandlerCost]


def fold(costs: RunCosts, *, inside: bool) -> Folded:
    """Divide the called handlers into those with a row of their own and those that share a row.

    Args:
        inside: True for the handlers called in iterations, False for all others.
    """
    total_seconds = costs.phases.wall if inside else run_seconds(costs)
    folded = Folded([], [], [])
    for cost in called_handlers(costs, inside=inside):
        least = BUILT_IN if cost.built_in else MATTERS
        if cost.over_budget or own_seconds(cost, costs.phases) >= least * total_seconds:
            folded.shown.append(cost)
        elif cost.built_in:
            folded.built_in.append(cost)
        else:
            folded.small.append(cost)
    return folded


def handlers_table(
    costs: RunCosts, shown: Sequence[HandlerCost] | None = None, *, inside: bool = True, least: float = 0.0
) -> Table:
    """Return the table of the handlers that were called in iterations, or of all other called handlers.

    Args:
        shown: the handlers to show; None means all called ones, the most expensive first.
        inside: True for the handlers called in iterations, False for all others.
        least: the time outside of handlers has a row if it is above this share of the iterations.
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
    title = INSIDE if inside else OUTSIDE
    table = Table(title, *cells(shown, columns), left=3, bad=_over_budget(shown), why=OVER)
    if not inside:
        return table._replace(first=OUTSIDE_FIRST)
    guessed = GUESSED if any(handler.estimated for handler in shown) else ""
    note = "\n".join(filter(None, [MEANS, guessed, never_called(costs)]))
    table = table._replace(note=note, first=INSIDE_FIRST)
    if (seconds := outside_handlers(costs.handlers, phases)) > least * phases.wall:
        row = _sum_row(table, OUTSIDE_HANDLERS, seconds, phases)
        table = table._replace(rows=[row, *table.rows], bad=frozenset(i + 1 for i in table.bad))
    return table


def folded_table(costs: RunCosts, most: int, *, inside: bool, least: float = MATTERS) -> Table:
    """Return the table of handlers, with a row each for at most `most` of them and a last row for the others.

    The last row does not include the times of phases that its handlers run.
    """
    shown, built_in, small = fold(costs, inside=inside)
    groups = {"more": shown[most:], "built-in": built_in, f"below {MATTERS:.0%}": small}
    others = [cost for group in groups.values() for cost in group]
    table = handlers_table(costs, shown[:most], inside=inside, least=least)
    if others:
        name = ", ".join(f"{len(group):,} {kind}" for kind, group in groups.items() if group)
        seconds = sum(own_seconds(cost, costs.phases) for cost in others)
        row = _sum_row(table, name, seconds, costs.phases, sum(cost.calls for cost in others))
        table.rows.append(row)
    return table


def _sum_row(table: Table, name: str, seconds: float, phases: Phases, calls: int | None = None) -> list[str]:
    """Return a row with the sums for several handlers, and "-" in the columns on single calls."""
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
    called = [h for h in costs.handlers if h.calls and inside in (None, h.in_iteration)]
    return sorted(called, key=lambda handler: -handler.seconds)


def with_includes(handler: HandlerCost, name: str = "") -> str:
    """Return the name of a handler, or the given one, followed by the phases that its time includes."""
    name = name or handler.name
    return f"{name} ({', '.join(handler.includes)}{IN_IT}" if handler.includes else name


def by_key(costs: RunCosts, *, inside: bool | None = None) -> dict[str, HandlerCost]:
    """Return the called handlers, the most expensive first, by a key that identifies them in several runs.

    The key has the handler's name, event and filter. A "'" is added to a key that an earlier one has taken.
    """
    handlers: dict[str, HandlerCost] = {}
    for handler in called_handlers(costs, inside=inside):
        key = _key(handler)
        while key in handlers:
            key += "'"
        handlers[key] = handler
    return handlers


def _key(handler: HandlerCost) -> str:
    """Return a handler's name, with its event unless the name has it, and its filter."""
    key = handler.name
    if not key.endswith(f".{handler.event}"):  # the name of a hook's method usually is that of its event
        key += f", {handler.event}"
    return f"{key} [{handler.filter}]" if handler.filter else key


def never_called(costs: RunCosts) -> str:
    """Return a note that names the handlers that were never called; "" if all were."""
    names = [_key(handler) for handler in costs.handlers if not handler.calls]
    if not names:
        return ""
    subject = "1 handler was" if len(names) == 1 else f"{len(names):,} handlers were"
    return f"{subject} never called: {'; '.join(names)}."
