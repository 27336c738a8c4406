"""Compare several runs: a table of the runs, and a row for each measured quantity with a value of each run.

Differences are seconds, relative to the first run. A ratio is shown only if the difference takes 1 % of a
run. `glance` and `html` draw the result; `text` draws it as tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from eventloop.costs.records import PHASES, WAITING, WAITS, HandlerCost, RunCosts, phase_names
from eventloop.costs.trend import medians
from eventloop.reporting.facts import missed, state, step_times
from eventloop.reporting.report import Report
from eventloop.reporting.tables import (
    COUNTS,
    IN_IT,
    WAITS_TITLE,
    Table,
    by_key,
    phase_name,
    with_includes,
    with_unit,
)
from eventloop.reporting.waits import seconds_waited
from eventloop.util.formatting import (
    ABSENT,
    count_or_time,
    duration,
    ratio,
    share,
    three_digits,
    value_text,
)

MATTERS = 0.01
"""The share of a run from which a difference between runs is shown with its ratio."""
NOISE = 0.05
"""The best and the worst figure are marked if they differ by more than this part of the larger one."""
LIKE = "≈"
"""The sign shown in place of a ratio if the difference takes less than 1 % of a run."""


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
        return max(_differences(self.values), default=(0.0, 0.0))[0]

    @property
    def matters(self) -> bool:
        """Return whether a difference takes at least 1 % of a run."""
        return any(seconds and seconds >= MATTERS * whole for seconds, whole in _differences(self.values))

    def ratio(self, run: int) -> str:
        """Return the ratio of a run to the first run; "≈" for a small difference, "-" without a ratio."""
        first, other = self.values[0], self.values[run]
        if first is None or other is None or not first.value:
            return ABSENT
        (seconds, whole) = _differences([first, other])[0]
        return ratio(other.value, first.value) if seconds and seconds >= MATTERS * whole else LIKE


class Comparison(NamedTuple):
    """The rows on one subject, such as handlers, with a title and a function that formats a value."""

    title: str
    what: str
    rows: list[Row]
    text: Callable[[Any], str]
    ratios: bool = True
    """Whether the values are times, so that ratios are shown."""


def _differences(values: Sequence[Measured | None]) -> list[tuple[float, float]]:
    """Return the seconds by which each later run differs from the first, and the duration of that run.

    A quantity that only one of the two runs has differs by its whole time. Later runs are left out if both
    lack it.
    """
    first, found = values[0], []
    for other in values[1:]:
        known = [each for each in (first, other) if each is not None]
        if known:
            apart = known[0].value if len(known) == 1 else abs(known[1].value - known[0].value)
            found.append((apart * known[-1].weight, known[-1].whole))
    return found


def compare(reports: Sequence[Report]) -> list[Comparison]:
    """Return the comparison of the runs by subject, such as phases or handlers, without empty subjects.

    Handlers that only some runs have come first, then the others by the size of the difference in time.
    """
    costs = [report.costs for report in reports]
    names = phase_names(*(each.phases for each in costs if each is not None))
    phases, usual = ([of(each, names) for each in costs] for of in (_phases, _usual))
    found = [
        Comparison("Step time, mean ms/iteration", "phase", _rows(phases), _milliseconds),
        Comparison("Step time, median ms/iteration", "phase", _rows(usual), _milliseconds),
        Comparison("Handlers, mean µs/iteration", "handler", _sorted(map(_inside, costs)), _microseconds),
        Comparison(
            "Handlers outside of the iterations, mean of a call", "handler", _sorted(map(_outside, costs)),
            duration,
        ),
        Comparison(WAITS_TITLE, "cause", _rows(_waits(costs)), duration),
        Comparison(
            "Background subscribers", "subscriber", _rows(map(_subscribers, costs), zeros=False),
            count_or_time, ratios=False,
        ),
        Comparison(
            "Scalars, the last value", "scalar", _rows(map(_curves, reports)), value_text, ratios=False
        ),
    ]  # fmt: skip
    return [each for each in found if each.rows]


def compared_by_time(costs: Sequence[RunCosts | None]) -> list[Row]:
    """Return phases, handlers and deliveries of the runs in one list, first those that some runs lack.

    Handlers whose time includes phases are left out, because the phases are rows themselves.
    """
    whole = [_named(_phases(each, PHASES), {"all": "an iteration"}, "phase {}") for each in costs]
    outside = [_named(_outside(each), {}, "{}, a call") for each in costs]
    deliveries = [_named(_deliveries(each), {}, "{}, a delivery") for each in costs]
    handlers = [{key: one for key, one in _inside(each).items() if not key.endswith(IN_IT)} for each in costs]
    parts = zip(whole, _waits(costs), handlers, outside, deliveries, strict=True)
    return _sorted({key: one for part in run for key, one in part.items()} for run in parts)


def _named(found: dict[str, Measured], names: dict[str, str], other: str) -> dict[str, Measured]:
    return {names.get(key, other.format(key)): value for key, value in found.items()}


def runs_table(reports: Sequence[Report], names: Sequence[str]) -> Table:
    """Return the table of the runs, a row for each run."""
    header = ["run", *_RUN_COLUMNS, "state"]
    rows = [
        [name, *(_cell(report.costs, cell) for cell in _RUN_COLUMNS.values()), state(report)]
        for name, report in zip(names, reports, strict=True)
    ]
    return Table("Runs", header, rows, first=RUNS_FIRST)


def extremes(numbers: Sequence[float | None], *, high: bool = False) -> tuple[set[int], set[int]]:
    """Return the indices of the best and of the worst numbers; both empty if they differ by 5 % or less."""
    known = [number for number in numbers if number is not None]
    if len(known) < 2 or max(known) - min(known) <= NOISE * max(map(abs, known)):
        return set(), set()
    low, top = ({i for i, n in enumerate(numbers) if n == end} for end in (min(known), max(known)))
    return (top, low) if high else (low, top)


def run_extremes(reports: Sequence[Report]) -> dict[str, tuple[set[int], set[int]]]:
    """Return the best and the worst runs by column of `runs_table`.

    Only columns are included in which a high or a low number is better, such as the iterations a second.
    """
    return {
        name: extremes([_number(report.costs, name) for report in reports], high=name == "a second")
        for name in ("a second", *STEP_COLUMNS, "not delivered")
    }


def _missed(costs: RunCosts) -> int:
    return sum(missed(subscriber, costs) for subscriber in costs.subscribers)


def _step_time(name: str, costs: RunCosts) -> str:
    times = step_times(costs)
    return duration(times[name]) if name in times else ABSENT


def _share(phase: str, costs: RunCosts) -> str:
    return share(getattr(costs.phases, phase), costs.phases.wall)


STEP_COLUMNS = ("p50", "p90", "p99", "mean")
RUNS_FIRST = ("a second", "p50", "p99", "hooks", "data", "state", "not delivered", "iterations", "took")
SHARES = ("data", "hooks")
_RUN_COLUMNS: dict[str, Callable[[RunCosts], str]] = {
    "a second": lambda costs: three_digits(costs.phases.iterations / costs.phases.wall),
    **{name: partial(_step_time, name) for name in STEP_COLUMNS},
    **{name: partial(_share, name) for name in SHARES},
    "iterations": lambda costs: f"{costs.phases.iterations:,}",
    "took": lambda costs: duration(costs.seconds) if costs.seconds else ABSENT,
    "evaluation": lambda costs: duration(costs.evaluation) if costs.evaluation else ABSENT,
    "not delivered": lambda costs: f"{_missed(costs):,}",
}


def _cell(costs: RunCosts | None, cell: Callable[[RunCosts], str]) -> str:
    return cell(costs) if costs is not None and costs.phases.iterations and costs.phases.wall else ABSENT


def _number(costs: RunCosts | None, name: str) -> float | None:
    """Return the number that a cell of `runs_table` shows, or None if the run lacks it."""
    if costs is None or not (costs.phases.iterations and costs.phases.wall):
        return None
    if name == "a second":
        return costs.phases.iterations / costs.phases.wall
    if name == "not delivered":
        return _missed(costs)
    return step_times(costs).get(name)


def comparison_tables(comparisons: Sequence[Comparison], names: Sequence[str]) -> list[Table]:
    """Return the comparisons as tables with a column for each run and for each ratio to the first run."""
    return [_table(each, names) for each in comparisons]


def _table(each: Comparison, names: Sequence[str]) -> Table:
    header, others = [each.what, *names], range(1, len(names)) if each.ratios else ()
    rows = [
        [row.name, *(text_of(value, each) for value in row.values), *(row.ratio(run) for run in others)]
        for row in each.rows
    ]
    note = f"{LIKE}: the difference takes less than {MATTERS:.0%} of the run." if others else ""
    return Table(each.title, header + [f"{names[run]} / {names[0]}" for run in others], rows, note=note)


def text_of(value: Measured | None, each: Comparison) -> str:
    return ABSENT if value is None else each.text(value.value)


# --- rows --------------------------------------------------------------------------------------------------


def _rows(runs: Iterable[dict[str, Measured]], *, zeros: bool = True) -> list[Row]:
    """Return a row for each name that occurs in any of the runs, with a value of each run.

    Args:
        zeros: whether to keep rows that are zero in all runs.
    """
    numbers = list(runs)
    rows = [
        Row(key, [run.get(key) for run in numbers]) for key in dict.fromkeys(k for r in numbers for k in r)
    ]
    return [row for row in rows if zeros or any(one is not None and one.value for one in row.values)]


def _sorted(runs: Iterable[dict[str, Measured]]) -> list[Row]:
    return sorted(_rows(runs), key=lambda row: (not row.only, -row.seconds))


def _milliseconds(seconds: float) -> str:
    return three_digits(seconds * 1e3)


def _microseconds(seconds: float) -> str:
    return three_digits(seconds * 1e6)


def _of_iterations(costs: RunCosts, seconds: float) -> Measured:
    return Measured(seconds, costs.phases.iterations, costs.phases.wall)


def _phases(costs: RunCosts | None, phases: Sequence[str]) -> dict[str, Measured]:
    """Return the mean times of an iteration by phase, with the whole iteration last."""
    if costs is None or not (number := costs.phases.iterations):
        return {}
    names = (*phases, "wall")
    return {phase_name(name): _of_iterations(costs, getattr(costs.phases, name) / number) for name in names}


def _usual(costs: RunCosts | None, phases: Sequence[str]) -> dict[str, Measured]:
    """Return the median times of an iteration as `_phases` returns the mean ones."""
    if costs is None or not (usual := medians(costs)):
        return {}
    return {phase_name(phase): _of_iterations(costs, usual[phase]) for phase in (*phases, "wall")}


def _inside(costs: RunCosts | None) -> dict[str, Measured]:
    if costs is None or not (number := costs.phases.iterations):
        return {}
    inside = by_key([handler for handler in costs.handlers if handler.in_iteration])
    return {with_includes(h, key): _of_iterations(costs, h.seconds / number) for key, h in inside.items()}


def _outside(costs: RunCosts | None) -> dict[str, Measured]:
    outside = [handler for handler in costs.handlers if not handler.in_iteration] if costs is not None else []
    return {key: _a_call(costs, handler) for key, handler in by_key(outside).items() if costs is not None}


def _a_call(costs: RunCosts, handler: HandlerCost) -> Measured:
    return Measured(handler.seconds / handler.calls, handler.calls, costs.seconds or costs.phases.wall)


def _waits(runs: Sequence[RunCosts | None]) -> list[dict[str, Measured]]:
    """Return for each run the seconds of its waits by cause, for the causes that any run has."""
    causes = [cause for cause in WAITS if any(costs and seconds_waited(costs, cause) for costs in runs)]

    def of(costs: RunCosts) -> dict[str, Measured]:
        whole = costs.seconds or costs.phases.wall
        return {WAITING[cause]: Measured(seconds_waited(costs, cause), 1, whole) for cause in causes}

    return [{} if costs is None else of(costs) for costs in runs]


def _deliveries(costs: RunCosts | None) -> dict[str, Measured]:
    if costs is None:
        return {}
    whole = costs.seconds or costs.phases.wall
    return {s.name: Measured(s.seconds / s.calls, s.calls, whole) for s in costs.subscribers if s.calls}


def _subscribers(costs: RunCosts | None) -> dict[str, Measured]:
    """Return the figures of each background subscriber by name; counts are ints, and times are floats."""
    found: dict[str, Measured] = {}
    for s in costs.subscribers if costs is not None else []:
        for name, field in COUNTS.items():
            found[f"{s.name}: {name}"] = Measured(getattr(s, field))
        found[f"{s.name}: busy, s"] = Measured(float(s.seconds))
    return found


def _curves(report: Report) -> dict[str, Measured]:
    curves = report.log.curves if report.log is not None else []
    return {f"{curve.mode}/{with_unit(curve.name)}": Measured(curve.last) for curve in curves}
