"""Make the tables of a report, of one run or of several runs side by side.

`text` draws them on a terminal, `html` on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eventloop.costs.records import PHASES, RunCosts
from eventloop.reporting.cells import Table, milliseconds, percentiles, step
from eventloop.reporting.downsample import Curve
from eventloop.reporting.facts import lossy, median_wall, medians, trend
from eventloop.reporting.handlers import (
    OVER,
    budget_of,
    handlers_table,
    microseconds_per_iteration,
    outside_table,
    seconds_per_call,
    without_budgets,
)
from eventloop.reporting.report import Report
from eventloop.util.formatting import (
    ABSENT,
    count_or_time,
    duration,
    on_a_line,
    ratio,
    share,
    three_digits,
    value_text,
)

IN_SECONDS = frozenset({"time", "data_time", "step_time", "hook_time"})
"""Scalars of IterTimerHook, which are in seconds."""
NOT_ALL = "it did not get, or did not manage, all of its events"
WAIT = (
    "Wait is from the emit of an event to the begin of its delivery: 0.1 to 0.2 s are normal, because events "
    "are collected in batches."
)


def run_tables(report: Report) -> list[Table]:
    """Return all tables of one run that have rows."""
    costs, log = report.costs, report.log
    found = []
    if costs is not None:
        found += [phases_table(costs), handlers_table(costs), outside_table(costs), subscribers_table(costs)]
    if log is not None and log.curves:
        found.append(curves_table(log.curves))
    return [table for table in found if table.rows]


def phases_table(costs: RunCosts) -> Table:
    """Return the table of an iteration's phases and their trend; without iterations it has no rows."""
    usual, phases = medians(costs), costs.phases
    header = ["phase", "mean, ms/iteration", "share"]
    header += ["median, ms/iteration", "share"] if usual is not None else []
    header += ["on the device, mean ms"] if costs.device is not None else []
    rows = []
    for phase in (*PHASES, "wall") if phases.iterations else ():
        seconds, name = getattr(phases, phase), "all" if phase == "wall" else phase
        row = [name, milliseconds(seconds, phases), share(seconds, phases.wall)]
        if usual is not None:
            wall = median_wall(costs)
            of_usual = wall if phase == "wall" else getattr(usual, phase)
            row += [milliseconds(of_usual, usual), share(of_usual, wall)]
        if costs.device is not None:
            on_device = getattr(costs.device, phase)
            row.append(milliseconds(on_device, costs.device) if on_device else ABSENT)
        rows.append(row)
    lines = [trend(costs, phase) for phase in (*PHASES, "wall")]
    return Table("Step time", header, rows, lines=lines, note=_median_note(costs))


def _median_note(costs: RunCosts) -> str:
    if not costs.trend:
        return ""
    stretch = costs.trend[0].phases.iterations
    of = "the single iterations" if stretch == 1 else f"the means of {stretch:,} iterations each"
    return (
        f"The median is over {of}: what is long but rare is in the mean alone. Medians need not add up to "
        "that of all."
    )


def subscribers_table(costs: RunCosts) -> Table:
    """Return the table of the background subscribers: their events, waits and deliveries."""
    header = [
        "subscriber", "event", "runs on", "delivered", "dropped", "failed", "left", "backlog", "spilled",
        "wait p50", "p99", "busy p50", "p99", "busy in all", "budget",
    ]  # fmt: skip
    rows = [
        [
            s.name, _some_events(s.event), s.runs_on,
            *(f"{n:,}" for n in (s.delivered, s.dropped, s.failed, s.queued, s.peak_queued, s.spilled)),
            *percentiles(s.wait), *percentiles(s.busy), duration(s.seconds), budget_of(s),
        ]
        for s in costs.subscribers
    ]  # fmt: skip
    lost = {i for i, s in enumerate(costs.subscribers) if lossy(s, costs)}
    over = {i for i, s in enumerate(costs.subscribers) if s.over_budget}
    why = "; or ".join(reason for reason, found in ((NOT_ALL, lost), (OVER, over)) if found)
    errors = [on_a_line(f"{s.name}: {s.error}") for s in costs.subscribers if s.error]
    note = f"In events; backlog is the longest queue there was. {WAIT}"
    note = "\n".join([note, *errors])
    table = Table("Background subscribers", header, rows, 3, frozenset(lost | over), why, note=note)
    return without_budgets(table, costs.subscribers)


def _some_events(names: str) -> str:
    """Return the first of several event names, and how many more there are."""
    first, *others = names.split(", ")
    return f"{first} and {len(others)} more" if others else first


def with_unit(name: str) -> str:
    """Return a scalar's name with its unit, if the unit is known."""
    return f"{name}, s" if name in IN_SECONDS else name


def curves_table(curves: Sequence[Curve]) -> Table:
    """Return the table of the logged scalars, with a row for each scalar and mode."""
    header = ["scalar", "mode", "records", "first", "last", "least", "at", "greatest", "at"]
    rows = [
        [
            with_unit(curve.name), curve.mode, f"{curve.count:,}", value_text(curve.first),
            value_text(curve.last), value_text(curve.least), step(curve.least_step),
            value_text(curve.greatest), step(curve.greatest_step),
        ]
        for curve in curves
    ]  # fmt: skip
    bad = frozenset(i for i, curve in enumerate(curves) if curve.not_finite)
    note = "\n".join(
        f"{curve.mode}/{curve.name}: {curve.not_finite:,} of {curve.count:,} values are NaN or infinite, "
        f"the first at step {step(curve.first_not_finite)}"
        for curve in curves
        if curve.not_finite
    )
    lines = [curve.mean for curve in curves]
    return Table("Scalars", header, rows, 2, bad, "not all of its values are finite", lines, note)


# --- side by side ------------------------------------------------------------------------------------------


def comparison_tables(reports: Sequence[Report], names: Sequence[str]) -> list[Table]:
    """Return the tables of several runs side by side, with ratios to the first run."""
    costs = [report.costs for report in reports]
    phases, usual = [_phase_numbers(c) for c in costs], [_usual_numbers(c) for c in costs]
    inside, outside = [microseconds_per_iteration(c) for c in costs], [seconds_per_call(c) for c in costs]
    background, last = [_subscriber_numbers(c) for c in costs], [_curve_numbers(r) for r in reports]
    found = [
        _compare("Step time, mean ms/iteration", "phase", names, phases, three_digits),
        _compare("Step time, median ms/iteration", "phase", names, usual, three_digits),
        _compare("Handlers, mean µs/iteration", "handler", names, inside, three_digits),
        _compare("Handlers outside of the iterations, mean of a call", "handler", names, outside, duration),
        _compare(
            "Background subscribers", "subscriber", names, background, count_or_time, zeros=False
        )._replace(note=WAIT),
        _compare("Scalars, the last value", "scalar", names, last, value_text),
    ]
    return [table for table in found if table.rows]


def _compare(
    title: str,
    what: str,
    names: Sequence[str],
    numbers: Sequence[dict[str, float]],
    text: Callable[[float], str],
    *,
    zeros: bool = True,
) -> Table:
    """Return a table with a row for each name in any of `numbers`: a column for each run, then the ratios.

    Args:
        zeros: whether to keep rows that are zero in all runs.
    """
    header = [what, *names, *(f"{name} / {names[0]}" for name in names[1:])]
    rows = []
    for key in dict.fromkeys(key for each in numbers for key in each):
        found = [each.get(key) for each in numbers]
        if not zeros and not any(found):
            continue
        first = found[0]
        rows.append(
            [
                key,
                *(ABSENT if number is None else text(number) for number in found),
                *(ABSENT if n is None or first is None else ratio(n, first) for n in found[1:]),
            ]
        )
    return Table(title, header, rows)


def _phase_numbers(costs: RunCosts | None) -> dict[str, float]:
    if costs is None or not costs.phases.iterations:
        return {}
    number = costs.phases.iterations
    parts = {phase: getattr(costs.phases, phase) / number * 1e3 for phase in PHASES}
    return parts | {"all": costs.phases.wall / number * 1e3}


def _usual_numbers(costs: RunCosts | None) -> dict[str, float]:
    usual = medians(costs) if costs is not None else None
    if costs is None or usual is None:
        return {}
    return {phase: getattr(usual, phase) * 1e3 for phase in PHASES} | {"all": median_wall(costs) * 1e3}


def _subscriber_numbers(costs: RunCosts | None) -> dict[str, float]:
    """Return the numbers of each background subscriber by name; counts are ints, times are floats."""
    found: dict[str, float] = {}
    for s in costs.subscribers if costs is not None else []:
        found |= {
            f"{s.name}: delivered": s.delivered,
            f"{s.name}: dropped": s.dropped,
            f"{s.name}: failed": s.failed,
            f"{s.name}: left": s.queued,
            f"{s.name}: backlog": s.peak_queued,
            f"{s.name}: wait from emit p99, ms": s.wait.p99 * 1e3,
            f"{s.name}: busy p99, ms": s.busy.p99 * 1e3,
        }
    return found


def _curve_numbers(report: Report) -> dict[str, float]:
    if report.log is None:
        return {}
    return {f"{curve.mode}/{with_unit(curve.name)}": curve.last for curve in report.log.curves}
