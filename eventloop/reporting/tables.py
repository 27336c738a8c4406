"""Make the tables of a report on one run.

`text` draws them on a terminal, and `html` on the page. `cells` fills each table, with a row for each item
and a function for each column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from eventloop.costs.records import (
    WAITING,
    HandlerCost,
    Phases,
    RunCosts,
    SubscriberCost,
    Times,
    phase_names,
)
from eventloop.costs.trend import medians, trend
from eventloop.reporting.curves import Curve
from eventloop.reporting.facts import ESTIMATED, OUTSIDE_HANDLERS, lossy, outside_handlers
from eventloop.reporting.report import Report
from eventloop.reporting.waits import PLACES
from eventloop.util.formatting import (
    ABSENT,
    duration,
    on_a_line,
    share,
    three_digits,
    value_text,
)

OVER = "its p99 went over its budget, as slow_handler said"
NOT_ALL = "it did not get, or did not manage, all of its events"
NOT_FINITE = "not all of its values are finite"
MEANS = (
    "µs/iteration and share are of all iterations; a call (its mean), p50, p99 and max are of single calls."
)
GUESSED = "~: estimated, because in a tight loop only some events are clocked; p50, p99 and max are of those."
WAIT = (
    "Wait is from the emit of an event to the begin of its delivery: 0.1 to 0.2 s are normal, because events "
    "are collected in batches."
)
RANKS = "Step time of all ranks"
WAITS_TITLE = "Waits"
APART = "No handler, evaluation or other phase includes these times."
DISCOUNTED = (
    "Means over all iterations. What a rank takes longer in a phase is a wait as far as it was ahead of "
    "the last one; the phases are without it."
)
ALL_RANKS = 8
"""The largest number of ranks for which each rank has a column."""
IN_SECONDS = frozenset({"time", "data_time", "step_time", "hook_time"})
"""The scalars of IterTimerHook, whose unit is seconds."""

OUTSIDE = "Handlers outside of the iterations"
INSIDE_FIRST = ("share", "a call", "calls", "µs/iteration", "p99", "budget", "max", "p50", "event")
OUTSIDE_FIRST = ("in all", "calls", "a call", "budget", "max", "event")
SUBSCRIBERS_FIRST = ("delivered", "dropped", "failed", "left", "backlog", "busy in all", "busy p50", "budget")

Column = tuple[str, Callable[[Any], str]]
"""The head of a column, and the function that returns an item's cell."""


class Table(NamedTuple):
    """A table of texts with a title; the first column has the names of the rows."""

    title: str
    header: list[str]
    rows: list[list[str]]
    left: int = 1
    """Number of text columns, from the left; the other columns are numbers."""
    bad: frozenset[int] = frozenset()
    """The indices of the rows to highlight."""
    why: str = ""
    """The reason for which rows are highlighted."""
    lines: list[list[float]] | None = None
    """A curve for each row, drawn at the end of the row; None without curves."""
    note: str = ""
    """One or more lines of explanation below the table."""
    first: tuple[str, ...] = ()
    """The columns that a narrow terminal shows first, by importance; all other columns follow."""


def reordered(table: Table) -> Table:
    """Return a table without its note and empty columns, with its most important columns first."""
    named = [table.header.index(name) for name in table.first if name in table.header]
    order = [i for i in dict.fromkeys([0, *named, *range(len(table.header))]) if filled(table, i)]
    rows = [[row[i] for i in order] for row in table.rows]
    return table._replace(header=[table.header[i] for i in order], rows=rows, left=1, note="")


def filled(table: Table, column: int) -> bool:
    """Return whether a column has a text or number in any row; the column of names always counts."""
    return not column or any(row[column] not in ("", ABSENT) for row in table.rows)


def cells(items: Sequence[Any], columns: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table, with a row for each item."""
    return [name for name, _ in columns], [[cell(item) for _, cell in columns] for item in items]


def run_tables(report: Report) -> list[Table]:
    """Return all tables of one run that have rows."""
    costs, log = report.costs, report.log
    found = []
    if costs is not None:
        found += [phases_table(costs), ranks_table(report), waits_table(costs)]
        found += [handlers_table(costs), outside_table(costs), subscribers_table(costs)]
    if log is not None:
        found.append(curves_table(log.curves))
    return [table for table in found if table.rows]


def phases_table(costs: RunCosts) -> Table:
    """Return the table of an iteration's phases and their trend; it has no rows without any iteration."""
    phases, usual, device = costs.phases, medians(costs), costs.device or Phases()
    rows = (*phase_names(phases), "wall") if phases.iterations else ()
    columns: list[Column] = [
        ("phase", phase_name),
        ("mean ms", lambda phase: _each(getattr(phases, phase), costs, 1e3)),
        ("share", lambda phase: share(getattr(phases, phase), phases.wall)),
    ]
    note = ""
    if usual:
        stretch = costs.trend[0].phases.iterations
        columns += [
            ("median ms", lambda phase: three_digits(usual[phase] * 1e3)),
            ("share", lambda phase: share(usual[phase], usual["wall"])),
        ]
        of = "the single iterations" if stretch == 1 else f"the means of {stretch:,} iterations each"
        note = (
            f"The median is over {of}: what is long but rare is in the mean alone. Medians need not add up "
            "to that of all."
        )
    if device.iterations:
        on_device = {phase: getattr(device, phase) / device.iterations for phase in rows}
        columns.append(
            (
                "device ms",
                lambda phase: three_digits(on_device[phase] * 1e3) if on_device[phase] else ABSENT,
            )
        )
    note = "\n".join(
        filter(None, ["ms of an iteration; device: its own mean time." if device.iterations else "", note])
    )
    return Table("Step time", *cells(rows, columns), lines=[trend(costs, phase) for phase in rows], note=note)


def ranks_table(report: Report) -> Table:
    """Return the table of the phases on all ranks; it has no rows if there is only one rank."""
    ranks, slow = report.ranks, report.slow_rank
    columns: list[Column] = [
        ("phase, ms/iteration", lambda row: row[0]),
        ("min", lambda row: three_digits(min(row[1]) * 1e3)),
        ("median", lambda row: three_digits(median(row[1]) * 1e3)),
        ("max", lambda row: three_digits(max(row[1]) * 1e3)),
        ("min on", lambda row: f"rank {ranks[row[1].index(min(row[1]))].rank}"),
        ("max on", lambda row: f"rank {ranks[row[1].index(max(row[1]))].rank}"),
    ]
    for number, each in enumerate(ranks if len(ranks) <= ALL_RANKS else []):
        columns.append((f"rank {each.rank}", partial(_number_of, number)))
    rows = [
        (phase_name(phase), [each.own[phase] for each in ranks]) for phase in (ranks[0].own if ranks else ())
    ]
    rows += [(phase_name("ranks"), [each.waited for each in ranks])] if ranks else []
    bad = frozenset(i for i, row in enumerate(rows) if slow is not None and row[0] == phase_name(slow.phase))
    why = f"rank {slow.rank} is slow in this phase" if slow is not None else ""
    return Table(RANKS, *cells(rows, columns), bad=bad, why=why, note=DISCOUNTED if rows else "")


def waits_table(costs: RunCosts) -> Table:
    """Return the table of the waits: a row for each cause, part of the run and name."""
    columns: list[Column] = [
        ("cause", lambda wait: WAITING[wait.cause]),
        ("where", lambda wait: PLACES[wait.place]),
        ("for", lambda wait: wait.name),
        ("in all", lambda wait: duration(wait.seconds)),
        ("of the run", lambda wait: share(wait.seconds, costs.seconds) if costs.seconds else ABSENT),
        ("waits", lambda wait: f"{wait.calls:,}"),
        ("longest", lambda wait: duration(wait.longest)),
    ]
    return Table(WAITS_TITLE, *cells(costs.waits, columns), left=3, note=APART)


def _number_of(rank: int, row: tuple[str, list[float]]) -> str:
    return three_digits(row[1][rank] * 1e3)


def handlers_table(
    costs: RunCosts, shown: Sequence[HandlerCost] | None = None, *, least: float = 0.0
) -> Table:
    """Return the table of the handlers called within iterations, the most expensive first.

    Args:
        shown: the handlers to show; None means all that were called.
        least: the share of the iterations from which the time outside of handlers has a row.
    """
    if shown is None:
        shown = [handler for handler in most_expensive(costs.handlers) if handler.in_iteration]
    columns: list[Column] = [
        ("handler", with_includes),
        *_WHICH,
        ("µs/iteration", lambda h: ABSENT if h.calls == 1 else _mark(h) + _each(h.seconds, costs, 1e6)),
        ("share", lambda h: f"{h.share * 100:.2f} %" if costs.phases.iterations else ABSENT),
        ("a call", lambda h: duration(h.seconds / h.calls)),
        ("p50", lambda h: _time(h.times, h.times.p50)),
        ("p99", lambda h: _time(h.times, h.times.p99)),
        ("max", lambda h: _time(h.times, h.times.max)),
        *_budgets(shown),
    ]
    guessed = GUESSED if any(handler.estimated for handler in shown) else ""
    note = "\n".join(filter(None, [MEANS, guessed, never_called(costs)]))
    header, rows = cells(shown, columns)
    bad = _over(shown)
    if (rest := outside_handlers(costs.handlers, costs.phases)) > least * costs.phases.wall:
        part = f"{rest / costs.phases.wall * 100:.2f} %"
        row = [OUTSIDE_HANDLERS, "", "", "", ABSENT, _each(rest, costs, 1e6), part]
        rows.insert(0, row + [ABSENT] * (len(header) - len(row)))
        bad = frozenset(i + 1 for i in bad)
    return Table("Handlers", header, rows, left=3, bad=bad, why=OVER, note=note, first=INSIDE_FIRST)


def outside_table(costs: RunCosts, shown: Sequence[HandlerCost] | None = None) -> Table:
    """Return the table of the handlers called outside of iterations.

    Args:
        shown: the handlers to show; None means all that were called.
    """
    if shown is None:
        shown = [handler for handler in most_expensive(costs.handlers) if not handler.in_iteration]
    columns: list[Column] = [
        ("handler", lambda h: h.name),
        *_WHICH,
        ("in all", lambda h: duration(h.seconds)),
        ("a call", lambda h: duration(h.seconds / h.calls)),
        ("max", lambda h: _time(h.times, h.times.max)),
        *_budgets(shown),
    ]
    header, rows = cells(shown, columns)
    return Table(OUTSIDE, header, rows, left=3, bad=_over(shown), why=OVER, first=OUTSIDE_FIRST)


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
    errors = [on_a_line(f"{s.name}: {s.error}") for s in shown if s.error]
    note = "\n".join([f"In events; backlog is the longest queue there was. {WAIT}", *errors])
    return Table(
        "Background subscribers", *cells(shown, columns), left=3, bad=lost | over, why=why, note=note,
        first=SUBSCRIBERS_FIRST,
    )  # fmt: skip


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
    bad = [i for i, curve in enumerate(curves) if curve.not_finite]
    note = "\n".join(
        f"{curve.mode}/{curve.name}: {curve.not_finite:,} of {curve.count:,} values are NaN or infinite, "
        f"the first at step {_step(curve.first_not_finite)}"
        for curve in curves
        if curve.not_finite
    )
    lines = [curve.mean for curve in curves]
    return Table(
        "Scalars", *cells(curves, columns), left=2, bad=frozenset(bad), why=NOT_FINITE, lines=lines, note=note
    )


IN_IT = " in it)"
"""The end of a handler's displayed name if its time includes that of phases, such as backward."""
COUNTS = {
    "delivered": "delivered", "dropped": "dropped", "failed": "failed", "left": "queued",
    "backlog": "peak_queued", "spilled": "spilled",
}  # fmt: skip
"""The fields of `SubscriberCost` that count events, by the column that shows them."""
_WHICH: list[Column] = [
    ("event", lambda h: h.event),
    ("filter", lambda h: h.filter),
    ("priority", lambda h: str(h.priority)),
    ("calls", lambda h: f"{h.calls:,}"),
]
"""The columns that identify a handler and count its calls."""


def _budgets(costs: Iterable[HandlerCost | SubscriberCost]) -> list[Column]:
    """Return the column of budgets (limits of p99); [] if nothing has a budget."""
    if all(cost.budget is None for cost in costs):
        return []
    return [("budget", lambda cost: ABSENT if cost.budget is None else duration(cost.budget))]


def _mark(handler: HandlerCost) -> str:
    return ESTIMATED if handler.estimated else ""


def _over(costs: Iterable[HandlerCost | SubscriberCost]) -> frozenset[int]:
    return frozenset(i for i, cost in enumerate(costs) if cost.over_budget)


def phase_name(phase: str) -> str:
    """Return the name of a phase in tables; that of all phases together is "all"."""
    return "all" if phase == "wall" else WAITING.get(phase, phase)


def _each(seconds: float, costs: RunCosts, unit: float) -> str:
    """Format the mean time per iteration, where `seconds` is the sum over all iterations."""
    return three_digits(seconds / costs.phases.iterations * unit) if costs.phases.iterations else ABSENT


def _time(times: Times, seconds: float) -> str:
    return duration(seconds) if times.samples else ABSENT


def _step(number: int | None) -> str:
    return ABSENT if number is None else f"{number:,}"


def _some_events(names: str) -> str:
    """Return the first of several event names, and the number of the others."""
    first, *others = names.split(", ")
    return f"{first} and {len(others)} more" if others else first


def with_unit(name: str) -> str:
    """Return a scalar's name with its unit, if the unit is known."""
    return f"{name}, s" if name in IN_SECONDS else name


# --- handlers ----------------------------------------------------------------------------------------------


def most_expensive(handlers: Sequence[HandlerCost]) -> list[HandlerCost]:
    """Return the handlers that were called, the most expensive first."""
    return sorted((h for h in handlers if h.calls), key=lambda handler: -handler.seconds)


def with_includes(handler: HandlerCost, name: str = "") -> str:
    """Return a handler's name followed by the phases that its time includes."""
    name = name or handler.name
    return f"{name} ({', '.join(handler.includes)}{IN_IT}" if handler.includes else name


def by_key(handlers: Sequence[HandlerCost]) -> dict[str, HandlerCost]:
    """Return the called handlers by a key of name, event and filter, the most expensive first.

    The key identifies a handler in several runs. Handlers with equal keys are distinguished by their order.
    """
    found: dict[str, HandlerCost] = {}
    for handler in most_expensive(handlers):
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
