"""Compare several runs: a table of the runs, and a row for each measured quantity with a value of each run.

Differences are seconds, relative to the first run. A ratio is shown only if the difference takes 1 % of a
run. `text` and `html` draw the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from eventloop.costs.records import PHASES, WAITING, WAITS, RunCosts, phase_names
from eventloop.costs.trend import medians
from eventloop.reporting.facts import missed, state, step_times
from eventloop.reporting.report import Report
from eventloop.reporting.run_tables import (
    COUNTS,
    IN_IT,
    MATTERS,
    WAITS_TITLE,
    by_key,
    phase_name,
    with_includes,
    with_unit,
)
from eventloop.reporting.tables import Table
from eventloop.reporting.waits import run_seconds, seconds_waited
from eventloop.util.formatting import (
    ABSENT,
    count_or_time,
    duration,
    ratio,
    share,
    three_digits,
    value_text,
)

NOISE = 0.05
"""The best and the worst figure are marked if they differ by more than this part of the larger one."""
LIKE = "≈"
"""The sign shown in place of a ratio if the difference takes less than 1 % of a run."""
RUNS_FIRST = ("a second", "p50", "p99", "hooks", "data", "state", "not delivered", "iterations", "took")


class Measured(NamedTuple):
    """One number of one run, and the factors by which a difference becomes a share of the run."""

    value: float
    weight: float = 0.0
    """The factor from the value to seconds of the run, such as the number of calls for a mean time."""
    whole: float = 0.0
    """The duration in seconds to which a difference is compared."""


class Row(NamedTuple):
    """One quantity, such as the time of a phase, with its value in each run."""

    name: str
    values: list[Measured | None]
    """The values by run; None where a run lacks the quantity."""

    @property
    def only(self) -> bool:
        """Return whether at least one run lacks the quantity."""
        return None in self.values

    @property
    def seconds(self) -> float:
        """Return the largest difference to the first run, in seconds over the whole run."""
        return max((self._difference(other) for other in self.values[1:]), default=(0.0, 0.0))[0]

    @property
    def matters(self) -> bool:
        """Return whether a difference takes at least 1 % of a run."""
        return any(map(self._matters, self.values[1:]))

    def ratio(self, run: int) -> str:
        """Return the ratio of a run to the first run; "≈" for a small difference, "-" without a ratio."""
        first, other = self.values[0], self.values[run]
        if first is None or other is None or not first.value:
            return ABSENT
        return ratio(other.value, first.value) if self._matters(other) else LIKE

    def _matters(self, other: Measured | None) -> bool:
        seconds, whole = self._difference(other)
        return bool(seconds) and seconds >= MATTERS * whole

    def _difference(self, other: Measured | None) -> tuple[float, float]:
        """Return the seconds by which a run differs from the first, and the duration of that run.

        A quantity that only one of the two runs has differs by its whole time.
        """
        first = self.values[0]
        known = other or first
        if known is None:
            return 0.0, 0.0
        apart = abs(other.value - first.value) if other and first else known.value
        return apart * known.weight, known.whole


class Comparison(NamedTuple):
    """The rows on one subject, such as handlers, with a title and a function that formats a value."""

    title: str
    what: str
    rows: list[Row]
    text: Callable[[Any], str]
    ratios: bool = True
    """Whether the values are times, so that ratios are shown."""

    def table(self, names: Sequence[str]) -> Table:
        """Return the values as a table with a column for each run; the best and the worst are marked."""
        values = [[ABSENT if v is None else self.text(v.value) for v in row.values] for row in self.rows]
        rows = [[row.name, *cells] for row, cells in zip(self.rows, values, strict=True)]
        compared = {i: row for i, row in enumerate(self.rows) if self.ratios and row.matters and not row.only}
        marks = {
            (i, run + 1): mark
            for i, row in compared.items()
            for run, mark in extremes([value and value.value for value in row.values]).items()
        }
        later = range(1, len(names)) if self.ratios else ()
        ratios = {(i, run + 1): row.ratio(run) for i, row in enumerate(self.rows) for run in later}
        below = {cell: ratio for cell, ratio in ratios.items() if ratio.endswith("×")}
        return Table(self.title, [self.what, *names], rows, marks=marks, below=below)


def compare(reports: Sequence[Report]) -> list[Comparison]:
    """Return the comparison of the runs by subject, such as phases or handlers, without empty subjects.

    Handlers that only some runs have come first, then the others by the size of the difference in time.
    """
    costs = [report.costs for report in reports]
    names = phase_names(*(each.phases for each in costs if each is not None))
    means, usual = _by_run(costs, lambda c: _phases(c, names)), _by_run(costs, lambda c: _usual(c, names))
    inside, outside = _by_run(costs, _inside), _by_run(costs, _outside)
    subscribers, curves = _by_run(costs, _subscribers), [_curves(report) for report in reports]
    milliseconds, microseconds = (lambda s: three_digits(s * 1e3)), (lambda s: three_digits(s * 1e6))
    found = [
        Comparison("Step time, mean ms/iteration", "phase", _rows(means), milliseconds),
        Comparison("Step time, median ms/iteration", "phase", _rows(usual), milliseconds),
        Comparison("Handlers, mean µs/iteration", "handler", _sorted(inside), microseconds),
        Comparison(
            "Handlers outside of the iterations, mean of a call", "handler", _sorted(outside), duration
        ),
        Comparison(WAITS_TITLE, "cause", _not_zero(_by_run(costs, _waits)), duration),
        Comparison("Background subscribers", "subscriber", _not_zero(subscribers), count_or_time, False),
        Comparison("Scalars, the last value", "scalar", _rows(curves), value_text, False),
    ]
    return [each for each in found if each.rows]


def compared_by_time(costs: Sequence[RunCosts | None]) -> list[Row]:
    """Return phases, handlers and deliveries of the runs in one list, first those that some runs lack.

    Handlers whose time includes phases are left out, because the phases are rows themselves.
    """
    return _sorted(_by_run(costs, _parts))


def _parts(costs: RunCosts) -> dict[str, Measured]:
    """Return the times of phases, waits, handlers and deliveries, by names that tell them apart."""
    phases = {f"phase {name}": value for name, value in _phases(costs, PHASES).items()}
    if (whole := phases.pop("phase all", None)) is not None:
        phases["an iteration"] = whole
    inside = {name: value for name, value in _inside(costs).items() if not name.endswith(IN_IT)}
    outside = {f"{name}, a call": value for name, value in _outside(costs).items()}
    deliveries = {
        f"{s.name}, a delivery": Measured(s.seconds / s.calls, s.calls, run_seconds(costs))
        for s in costs.subscribers
        if s.calls
    }
    return phases | _waits(costs) | inside | outside | deliveries


def comparison_tables(comparisons: Sequence[Comparison], names: Sequence[str]) -> list[Table]:
    """Return the comparisons as tables with a column for each run and for each ratio to the first run."""
    found = []
    for each in comparisons:
        table, others = each.table(names), range(1, len(names)) if each.ratios else ()
        header = [*table.header, *(f"{names[run]} / {names[0]}" for run in others)]
        pairs = zip(table.rows, each.rows, strict=True)
        rows = [[*cells, *(row.ratio(run) for run in others)] for cells, row in pairs]
        note = f"{LIKE}: the difference takes less than {MATTERS:.0%} of the run." if others else ""
        found.append(table._replace(header=header, rows=rows, note=note))
    return found


# --- the runs ----------------------------------------------------------------------------------------------


class _Figure(NamedTuple):
    """A column of the table of the runs: a number of a run, None if the run lacks it, and its format."""

    number: Callable[[RunCosts], float | None]
    text: Callable[[Any], str]
    marked: bool = True
    """Whether a high or a low number is better, so that the best and the worst are marked."""


_FIGURES: Mapping[str, _Figure] = {
    "a second": _Figure(lambda costs: costs.phases.iterations / costs.phases.wall, three_digits),
    "p50": _Figure(lambda costs: step_times(costs).get("p50"), duration),
    "p90": _Figure(lambda costs: step_times(costs).get("p90"), duration),
    "p99": _Figure(lambda costs: step_times(costs).get("p99"), duration),
    "mean": _Figure(lambda costs: step_times(costs)["mean"], duration),
    "data": _Figure(lambda costs: costs.phases.data / costs.phases.wall, partial(share, whole=1.0), False),
    "hooks": _Figure(lambda costs: costs.phases.hooks / costs.phases.wall, partial(share, whole=1.0), False),
    "iterations": _Figure(lambda costs: costs.phases.iterations, count_or_time, False),
    "took": _Figure(lambda costs: costs.seconds or None, duration, False),
    "evaluation": _Figure(lambda costs: costs.evaluation or None, duration, False),
    "not delivered": _Figure(lambda costs: sum(missed(s, costs) for s in costs.subscribers), count_or_time),
}


def runs_table(reports: Sequence[Report], names: Sequence[str]) -> Table:
    """Return the table of the runs, a row for each run, with marks on the best and the worst figures."""
    rows = [[name] for name in names]
    marks: dict[tuple[int, int], str] = {}
    costs = [report.costs for report in reports]
    trained = [c if c is not None and c.phases.iterations and c.phases.wall else None for c in costs]
    for column, (name, figure) in enumerate(_FIGURES.items(), 1):
        numbers = [None if each is None else figure.number(each) for each in trained]
        for row, number in zip(rows, numbers, strict=True):
            row.append(ABSENT if number is None else figure.text(number))
        found = extremes(numbers, high=name == "a second") if figure.marked else {}
        marks |= {(run, column): mark for run, mark in found.items()}
    for row, report in zip(rows, reports, strict=True):
        row.append(state(report))
    return Table("Runs", ["run", *_FIGURES, "state"], rows, first=RUNS_FIRST, marks=marks)


def extremes(numbers: Sequence[float | None], *, high: bool = False) -> dict[int, str]:
    """Return "best" and "worst" by the index of a number; {} if all numbers differ by 5 % or less.

    Args:
        high: whether the highest number is the best.
    """
    known = [number for number in numbers if number is not None]
    if len(known) < 2 or max(known) - min(known) <= NOISE * max(map(abs, known)):
        return {}
    ends = {max(known): "best" if high else "worst", min(known): "worst" if high else "best"}
    return {i: ends[number] for i, number in enumerate(numbers) if number in ends}


# --- rows --------------------------------------------------------------------------------------------------

Values = dict[str, Measured]
"""The numbers of one run by the names of their rows."""


def _by_run(runs: Iterable[RunCosts | None], values: Callable[[RunCosts], Values]) -> list[Values]:
    return [{} if costs is None else values(costs) for costs in runs]


def _rows(runs: Sequence[Values]) -> list[Row]:
    """Return a row for each name that occurs in any of the runs, with a value of each run."""
    names = dict.fromkeys(name for run in runs for name in run)
    return [Row(name, [run.get(name) for run in runs]) for name in names]


def _not_zero(runs: Sequence[Values]) -> list[Row]:
    """Return the rows that are not zero in all runs."""
    return [row for row in _rows(runs) if any(value is not None and value.value for value in row.values)]


def _sorted(runs: Sequence[Values]) -> list[Row]:
    return sorted(_rows(runs), key=lambda row: (not row.only, -row.seconds))


def _an_iteration(costs: RunCosts, seconds: float) -> Measured:
    return Measured(seconds, costs.phases.iterations, costs.phases.wall)


def _phases(costs: RunCosts, phases: Sequence[str]) -> Values:
    """Return the mean times of an iteration by phase, with the whole iteration last."""
    names = (*phases, "wall") if (number := costs.phases.iterations) else ()
    return {phase_name(name): _an_iteration(costs, getattr(costs.phases, name) / number) for name in names}


def _usual(costs: RunCosts, phases: Sequence[str]) -> Values:
    """Return the median times of an iteration as `_phases` returns the mean ones."""
    names = (*phases, "wall") if (usual := medians(costs)) else ()
    return {phase_name(name): _an_iteration(costs, usual[name]) for name in names}


def _inside(costs: RunCosts) -> Values:
    handlers = by_key(costs, inside=True) if (number := costs.phases.iterations) else {}
    return {with_includes(h, key): _an_iteration(costs, h.seconds / number) for key, h in handlers.items()}


def _outside(costs: RunCosts) -> Values:
    whole, handlers = run_seconds(costs), by_key(costs, inside=False)
    return {key: Measured(h.seconds / h.calls, h.calls, whole) for key, h in handlers.items()}


def _waits(costs: RunCosts) -> Values:
    """Return the seconds of the waits by cause."""
    whole = run_seconds(costs)
    return {WAITING[cause]: Measured(seconds_waited(costs, cause), 1, whole) for cause in WAITS}


def _subscribers(costs: RunCosts) -> Values:
    """Return the figures of each background subscriber by name; counts are ints, and times are floats."""
    found: Values = {}
    for s in costs.subscribers:
        found |= {f"{s.name}: {name}": Measured(getattr(s, field)) for name, field in COUNTS.items()}
        found[f"{s.name}: busy, s"] = Measured(float(s.seconds))
    return found


def _curves(report: Report) -> Values:
    curves = report.log.curves if report.log is not None else []
    return {f"{curve.mode}/{with_unit(curve.name)}": Measured(curve.last) for curve in curves}
