"""Compare several runs by tables with a row for each measured quantity and a column for each run.

Each run is compared with the first one. The ratio of two times is shown only if their difference, summed up
over the run, takes 1 % of the run. `text` and `page` draw the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

from eventloop.costs.records import PHASES, WAITING, WAITS, RunCosts, phase_names
from eventloop.costs.trend import medians as median_times
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
"""The best and worst of several numbers are marked if they differ by more than this part of the larger."""
LIKE = "≈"
"""The sign shown in place of a ratio if the difference takes less than 1 % of a run."""
RUNS_FIRST = ("a second", "p50", "p99", "hooks", "data", "state", "not delivered", "iterations", "took")
"""The columns of the table of the runs that a narrow terminal shows first, by importance."""


class Measured(NamedTuple):
    """Hold one number of one run, and how much of the run's time it stands for."""

    value: float
    weight: float = 0.0
    """The number of times that the run took `value` seconds, such as the calls of a handler."""
    whole: float = 0.0
    """The seconds of all iterations, or of the run, of which `value * weight` is a part."""


class Row(NamedTuple):
    """Hold one quantity, such as the time of a phase, with its value in each run."""

    name: str
    values: list[Measured | None]
    """The values in the order of the runs; None for a run without the quantity."""

    @property
    def only(self) -> bool:
        """True if a run lacks the quantity."""
        return None in self.values

    @property
    def seconds(self) -> float:
        """The largest difference to the first run, in seconds over the whole run."""
        return max((self._difference(other) for other in self.values[1:]), default=(0.0, 0.0))[0]

    @property
    def matters(self) -> bool:
        """True if the time of this quantity in a run and in the first run differs by 1 % of the whole run."""
        return any(map(self._matters, self.values[1:]))

    def ratio(self, run: int) -> str:
        """Return the ratio of a run's value to that of the first run, such as "1.50×".

        It is "≈" if the difference takes less than 1 % of the run, and "-" if a run has no value.
        """
        first, other = self.values[0], self.values[run]
        if first is None or other is None or not first.value:
            return ABSENT
        return ratio(other.value, first.value) if self._matters(other) else LIKE

    def _matters(self, other: Measured | None) -> bool:
        seconds, whole = self._difference(other)
        return bool(seconds) and seconds >= MATTERS * whole

    def _difference(self, other: Measured | None) -> tuple[float, float]:
        """Return by how many seconds a run differs from the first one in all, and the seconds of the run.

        If only one of the two runs has the quantity, its whole time is the difference.
        """
        first = self.values[0]
        present = other or first
        if present is None:
            return 0.0, 0.0
        change = abs(other.value - first.value) if other and first else present.value
        return change * present.weight, present.whole


class Comparison(NamedTuple):
    """Hold the rows on one subject, such as handlers, from which a table is made."""

    title: str
    what: str
    """The head of the column with the names of the rows."""
    rows: list[Row]
    text: Callable[[Any], str]
    """Formats a value."""
    ratios: bool = True
    """Whether the values are times, so that ratios are shown."""

    def table(self, names: Sequence[str]) -> Table:
        """Return the values as a table with a column for each run.

        In rows with a difference that matters, the best and the worst value are marked.
        """
        rows: list[list[str]] = []
        marks: dict[tuple[int, int], str] = {}
        below: dict[tuple[int, int], str] = {}
        for number, row in enumerate(self.rows):
            values = [ABSENT if value is None else self.text(value.value) for value in row.values]
            rows.append([row.name, *values])
            if self.ratios and row.matters and not row.only:
                found = extremes([value and value.value for value in row.values])
                marks |= {(number, run + 1): mark for run, mark in found.items()}
            for run in range(1, len(names)) if self.ratios else ():
                if (ratio := row.ratio(run)).endswith("×"):
                    below[number, run + 1] = ratio
        return Table(self.title, [self.what, *names], rows, marks=marks, below=below)


def compare(reports: Sequence[Report]) -> list[Comparison]:
    """Return a comparison of the runs for each subject, such as phases or handlers, that has rows.

    Handlers that only some runs have come first, then the others, those with the largest differences first.
    """
    costs = [report.costs for report in reports]
    names = phase_names(*(record.phases for record in costs if record is not None))
    means = _by_run(costs, lambda record: _mean_phases(record, names))
    medians = _by_run(costs, lambda record: _median_phases(record, names))
    inside, outside = _by_run(costs, _inside), _by_run(costs, _outside)
    subscribers, curves = _by_run(costs, _subscribers), [_curves(report) for report in reports]
    milliseconds, microseconds = (lambda s: three_digits(s * 1e3)), (lambda s: three_digits(s * 1e6))
    comparisons = [
        Comparison("Step time, mean ms/iteration", "phase", _rows(means), milliseconds),
        Comparison("Step time, median ms/iteration", "phase", _rows(medians), milliseconds),
        Comparison("Handlers, mean µs/iteration", "handler", _sorted(inside), microseconds),
        Comparison(
            "Handlers outside of the iterations, mean of a call", "handler", _sorted(outside), duration
        ),
        Comparison(WAITS_TITLE, "cause", _not_zero(_by_run(costs, _waits)), duration),
        Comparison("Background subscribers", "subscriber", _not_zero(subscribers), count_or_time, False),
        Comparison("Scalars, the last value", "scalar", _rows(curves), value_text, False),
    ]
    return [comparison for comparison in comparisons if comparison.rows]


def compared_by_time(costs: Sequence[RunCosts | None]) -> list[Row]:
    """Return a row for each phase, handler and delivery of the runs, first those that some runs lack.

    Handlers whose time includes phases are left out, because the phases are rows themselves.
    """
    return _sorted(_by_run(costs, _parts))


def _parts(costs: RunCosts) -> dict[str, Measured]:
    """Return the times of phases, waits, handlers and deliveries, by names that do not collide."""
    phases = {f"phase {name}": value for name, value in _mean_phases(costs, PHASES).items()}
    if (iteration := phases.pop("phase all", None)) is not None:
        phases["an iteration"] = iteration
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
    tables = []
    for comparison in comparisons:
        table = comparison.table(names)
        later_runs = range(1, len(names)) if comparison.ratios else ()
        header = [*table.header, *(f"{names[run]} / {names[0]}" for run in later_runs)]
        pairs = zip(table.rows, comparison.rows, strict=True)
        rows = [[*cells, *(row.ratio(run) for run in later_runs)] for cells, row in pairs]
        note = f"{LIKE}: the difference takes less than {MATTERS:.0%} of the run." if later_runs else ""
        tables.append(table._replace(header=header, rows=rows, note=note))
    return tables


# --- the runs ----------------------------------------------------------------------------------------------


class _Figure(NamedTuple):
    """Define a column of the table of the runs by a function for the number and one for its text."""

    number: Callable[[RunCosts], float | None]
    """Returns the number of a run, or None if the run lacks it."""
    text: Callable[[Any], str]
    marked: bool = True
    """Whether the best and the worst number are marked."""


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
    """Return a table with a row for each run, in which the best and the worst numbers are marked."""
    rows = [[name] for name in names]
    marks: dict[tuple[int, int], str] = {}
    costs = [report.costs for report in reports]
    for column, (name, figure) in enumerate(_FIGURES.items(), 1):
        numbers = [figure.number(record) if _has_iterations(record) else None for record in costs]
        for row, number in zip(rows, numbers, strict=True):
            row.append(ABSENT if number is None else figure.text(number))
        run_marks = extremes(numbers, high=name == "a second") if figure.marked else {}
        marks |= {(run, column): mark for run, mark in run_marks.items()}
    for row, report in zip(rows, reports, strict=True):
        row.append(state(report))
    return Table("Runs", ["run", *_FIGURES, "state"], rows, first=RUNS_FIRST, marks=marks)


def _has_iterations(costs: RunCosts | None) -> TypeGuard[RunCosts]:
    return costs is not None and bool(costs.phases.iterations and costs.phases.wall)


def extremes(numbers: Sequence[float | None], *, high: bool = False) -> dict[int, str]:
    """Return the marks "best" and "worst" by the index of a number; {} if all differ by 5 % or less.

    Args:
        high: whether the highest number is the best; else it is the lowest.
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
    """Return a row for each name that occurs in a run, with the value of each run or None."""
    names = dict.fromkeys(name for run in runs for name in run)
    return [Row(name, [run.get(name) for run in runs]) for name in names]


def _not_zero(runs: Sequence[Values]) -> list[Row]:
    """Return the rows with a value other than zero in at least one run."""
    return [row for row in _rows(runs) if any(value is not None and value.value for value in row.values)]


def _sorted(runs: Sequence[Values]) -> list[Row]:
    """Return the rows: first those that a run lacks, then those with the largest differences in seconds."""
    return sorted(_rows(runs), key=lambda row: (not row.only, -row.seconds))


def _an_iteration(costs: RunCosts, seconds: float) -> Measured:
    """Return seconds per iteration as a number of the run that can be compared."""
    return Measured(seconds, costs.phases.iterations, costs.phases.wall)


def _mean_phases(costs: RunCosts, phases: Sequence[str]) -> Values:
    """Return the mean seconds of each phase of an iteration, and of the whole iteration as "all"."""
    names = (*phases, "wall") if (number := costs.phases.iterations) else ()
    return {phase_name(name): _an_iteration(costs, getattr(costs.phases, name) / number) for name in names}


def _median_phases(costs: RunCosts, phases: Sequence[str]) -> Values:
    """Return the median seconds of each phase of an iteration, and of the whole iteration as "all"."""
    names = (*phases, "wall") if (usual := median_times(costs)) else ()
    return {phase_name(name): _an_iteration(costs, usual[name]) for name in names}


def _inside(costs: RunCosts) -> Values:
    """Return the mean seconds per iteration of the handlers that are called in iterations."""
    handlers = by_key(costs, inside=True) if (number := costs.phases.iterations) else {}
    return {with_includes(h, key): _an_iteration(costs, h.seconds / number) for key, h in handlers.items()}


def _outside(costs: RunCosts) -> Values:
    """Return the mean seconds of a call of the handlers that are called outside of iterations."""
    whole, handlers = run_seconds(costs), by_key(costs, inside=False)
    return {key: Measured(h.seconds / h.calls, h.calls, whole) for key, h in handlers.items()}


def _waits(costs: RunCosts) -> Values:
    """Return the seconds that the run waited, by cause."""
    whole = run_seconds(costs)
    return {WAITING[cause]: Measured(seconds_waited(costs, cause), 1, whole) for cause in WAITS}


def _subscribers(costs: RunCosts) -> Values:
    """Return the counts (ints) and busy seconds (floats) of each background subscriber, by name."""
    values: Values = {}
    for s in costs.subscribers:
        values |= {f"{s.name}: {name}": Measured(getattr(s, field)) for name, field in COUNTS.items()}
        values[f"{s.name}: busy, s"] = Measured(float(s.seconds))
    return values


def _curves(report: Report) -> Values:
    curves = report.log.curves if report.log is not None else []
    return {f"{curve.mode}/{with_unit(curve.name)}": Measured(curve.last) for curve in curves}
