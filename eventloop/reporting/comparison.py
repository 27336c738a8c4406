"""Make the tables of several runs side by side, with ratios to the first run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from eventloop.costs.records import PHASES, RunCosts
from eventloop.reporting.report import Report
from eventloop.reporting.tables import (
    COUNTS,
    WAIT,
    Column,
    Table,
    by_key,
    cells,
    phase_name,
    with_includes,
    with_unit,
)
from eventloop.reporting.trend import medians
from eventloop.util.formatting import ABSENT, count_or_time, duration, ratio, three_digits, value_text


def comparison_tables(reports: Sequence[Report], names: Sequence[str]) -> list[Table]:
    """Return the tables of several runs side by side, with ratios to the first run."""
    costs = [report.costs for report in reports]
    found = [
        _compare("Step time, mean ms/iteration", "phase", names, map(_phase_numbers, costs), three_digits),
        _compare("Step time, median ms/iteration", "phase", names, map(_usual_numbers, costs), three_digits),
        _compare("Handlers, mean µs/iteration", "handler", names, map(_handler_numbers, costs), three_digits),
        _compare(
            "Handlers outside of the iterations, mean of a call", "handler", names,
            map(_outside_numbers, costs), duration,
        ),
        _compare(
            "Background subscribers", "subscriber", names, map(_subscriber_numbers, costs), count_or_time,
            zeros=False,
        )._replace(note=WAIT),
        _compare("Scalars, the last value", "scalar", names, map(_curve_numbers, reports), value_text),
    ]  # fmt: skip
    return [table for table in found if table.rows]


def _compare(
    title: str,
    what: str,
    names: Sequence[str],
    each: Iterable[dict[str, float]],
    text: Callable[[float], str],
    *,
    zeros: bool = True,
) -> Table:
    """Return a table with a row for each name in any of the runs' numbers: a column a run, then the ratios.

    Args:
        zeros: whether to keep rows that are zero in all runs.
    """
    numbers = list(each)
    keys = list(
        dict.fromkeys(key for run in numbers for key in run if zeros or any(r.get(key) for r in numbers))
    )

    def value(run: dict[str, float]) -> Callable[[str], str]:
        return lambda key: text(run[key]) if key in run else ABSENT

    def compared(run: dict[str, float]) -> Callable[[str], str]:
        return lambda key: ratio(run[key], numbers[0][key]) if key in run and key in numbers[0] else ABSENT

    columns: list[Column] = [(what, str)]
    columns += [(name, value(run)) for name, run in zip(names, numbers, strict=True)]
    columns += [
        (f"{name} / {names[0]}", compared(run)) for name, run in zip(names[1:], numbers[1:], strict=True)
    ]
    return Table(title, *cells(keys, columns))


def _phase_numbers(costs: RunCosts | None) -> dict[str, float]:
    if costs is None or not costs.phases.iterations:
        return {}
    unit = 1e3 / costs.phases.iterations
    return {phase_name(phase): getattr(costs.phases, phase) * unit for phase in (*PHASES, "wall")}


def _usual_numbers(costs: RunCosts | None) -> dict[str, float]:
    usual = medians(costs) if costs is not None else {}
    return {phase_name(phase): seconds * 1e3 for phase, seconds in usual.items()}


def _handler_numbers(costs: RunCosts | None) -> dict[str, float]:
    if costs is None or not costs.phases.iterations:
        return {}
    unit = 1e6 / costs.phases.iterations
    inside = by_key([handler for handler in costs.handlers if handler.in_iteration])
    return {with_includes(handler, key): handler.seconds * unit for key, handler in inside.items()}


def _outside_numbers(costs: RunCosts | None) -> dict[str, float]:
    outside = [handler for handler in costs.handlers if not handler.in_iteration] if costs is not None else []
    return {key: handler.seconds / handler.calls for key, handler in by_key(outside).items()}


def _subscriber_numbers(costs: RunCosts | None) -> dict[str, float]:
    """Return the numbers of each background subscriber by name; counts are ints, times are floats."""
    found: dict[str, float] = {}
    for s in costs.subscribers if costs is not None else []:
        found |= {
            f"{s.name}: {name}": getattr(s, field) for name, field in COUNTS.items() if name != "spilled"
        }
        found[f"{s.name}: wait from emit p99, ms"] = s.wait.p99 * 1e3
        found[f"{s.name}: busy p99, ms"] = s.busy.p99 * 1e3
    return found


def _curve_numbers(report: Report) -> dict[str, float]:
    curves = report.log.curves if report.log is not None else []
    return {f"{curve.mode}/{with_unit(curve.name)}": curve.last for curve in curves}
