"""The tables of a report, the same for the terminal and for the page; also of several runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from eventloop.costs import PHASES, HandlerCost, Phases, RunCosts, SubscriberCost, Times
from eventloop.envelope import Curve
from eventloop.report import Report
from eventloop.units import ABSENT, count_or_time, duration, on_a_line, ratio, share, three_digits, value_text


class Table(NamedTuple):
    """Rows of texts; the first column is a name."""

    title: str
    header: list[str]
    rows: list[list[str]]
    left: int = 1
    """Columns that are texts, from the left; the others are numbers."""
    bad: frozenset[int] = frozenset()
    """The rows that somebody should look at."""
    lines: list[list[float]] | None = None
    """A curve for each row."""
    note: str = ""


def labels(reports: Sequence[Report]) -> list[str]:
    """A short name for each run: its directory's, or as much of the path as tells them apart."""
    paths = [Path(report.run).resolve().parts for report in reports]
    for length in range(1, max(map(len, paths)) + 1):
        short = ["/".join(parts[-length:]) for parts in paths]
        if len(set(short)) == len(set(paths)):
            break
    seen: list[str] = []
    for name in short:
        number = sum(1 for other in short[: len(seen)] if other == name)
        seen.append(f"{name} ({number + 1})" if number else name)
    return seen


def facts(report: Report) -> list[tuple[str, str]]:
    """What a person wants to know first: the name of a number, and the number."""
    costs, log = report.costs, report.log
    found = []
    if costs is not None:
        found += _cost_facts(costs)
    elif log is not None and log.curves:
        found.append(("logged up to iteration", f"{max(max(curve.steps) for curve in log.curves):,}"))
    found.append(("state", state(report)))
    return found


def state(report: Report) -> str:
    """`completed`, `error: ...`, another reason to stop, or `under way or killed`."""
    if report.log is not None and report.log.ended is not None:
        return report.log.ended
    return "ended" if report.costs is not None and report.costs.complete else "under way or killed"


def _cost_facts(costs: RunCosts) -> list[tuple[str, str]]:
    phases = costs.phases
    lost = sum(s.dropped + s.failed for s in costs.subscribers)
    found = [("iterations", f"{phases.iterations:,}")]
    if phases.iterations and phases.wall:
        found += [
            ("an iteration", duration(phases.wall / phases.iterations)),
            ("iterations a second", three_digits(phases.iterations / phases.wall)),
            ("of it hooks", share(phases.hooks, phases.wall)),
            ("of it waiting for data", share(phases.data, phases.wall)),
        ]
    if costs.subscribers:
        found.append(("events dropped or failed", f"{lost:,}"))
    return found


def of_run(report: Report) -> list[Table]:
    """All tables of one run."""
    costs, log = report.costs, report.log
    found = []
    if costs is not None:
        found += [phases_table(costs), handlers_table(costs), subscribers_table(costs)]
    if log is not None and log.curves:
        found.append(curves_table(log.curves))
    return [table for table in found if table.rows]


def phases_table(costs: RunCosts) -> Table:
    """Where an iteration's time goes, and how that changed."""
    header = ["phase", "ms/iteration", "share"]
    if costs.device is not None:
        header.append("on the device, ms")
    rows = []
    for phase in (*PHASES, "wall"):
        seconds, name = getattr(costs.phases, phase), "all" if phase == "wall" else phase
        row = [name, _milliseconds(seconds, costs.phases), share(seconds, costs.phases.wall)]
        if costs.device is not None:
            on_device = getattr(costs.device, phase)
            row.append(_milliseconds(on_device, costs.device) if on_device else ABSENT)
        rows.append(row)
    lines = [trend(costs, phase) for phase in (*PHASES, "wall")]
    return Table("Step time", header, rows, lines=lines)


def trend(costs: RunCosts, phase: str) -> list[float]:
    """Seconds an iteration, one number a point of the trend."""
    return [
        getattr(point.phases, phase) / point.phases.iterations
        for point in costs.trend
        if point.phases.iterations
    ]


def handlers_table(costs: RunCosts) -> Table:
    """What each synchronous handler costs, the dearest first."""
    header = [
        "handler",
        "event",
        "filter",
        "priority",
        "calls",
        "µs/iteration",
        "share",
        "p50",
        "p99",
        "max",
        "budget",
    ]
    dearest = sorted((h for h in costs.handlers if h.calls), key=lambda handler: -handler.seconds)
    idle = len(costs.handlers) - len(dearest)
    rows = [
        [
            handler.name, handler.event, handler.filter, str(handler.priority), f"{handler.calls:,}",
            _microseconds(handler.seconds, costs.phases), f"{handler.share * 100:.2f} %",
            *_percentiles(handler.times), _longest(handler.times),
            ABSENT if handler.budget is None else duration(handler.budget),
        ]
        for handler in dearest
    ]  # fmt: skip
    bad = frozenset(i for i, handler in enumerate(dearest) if over_budget(handler))
    note = "Calls are counted, times are estimated from samples; p50, p99 and max are of single calls."
    note += f" Never called: {idle:,}." if idle else ""
    return Table("Handlers", header, rows, 3, bad, note=note)


def over_budget(handler: HandlerCost) -> bool:
    """Whether its p99 is more than it should be."""
    return handler.budget is not None and handler.times.p99 > handler.budget


def subscribers_table(costs: RunCosts) -> Table:
    """What each background subscriber was given, and how it kept up."""
    header = [
        "subscriber", "event", "runs on", "delivered", "dropped", "failed", "left", "backlog", "spilled",
        "wait p50", "p99", "busy p50", "p99", "busy in all",
    ]  # fmt: skip
    rows = [
        [
            s.name, _some_events(s.event), s.runs_on,
            *(f"{n:,}" for n in (s.delivered, s.dropped, s.failed, s.queued, s.peak_queued, s.spilled)),
            *_percentiles(s.wait), *_percentiles(s.busy), duration(s.seconds),
        ]
        for s in costs.subscribers
    ]  # fmt: skip
    bad = frozenset(i for i, s in enumerate(costs.subscribers) if lossy(s))
    errors = [on_a_line(f"{s.name}: {s.error}") for s in costs.subscribers if s.error]
    note = "In events; backlog is the longest queue there was, wait the time from the queue to the delivery."
    return Table("Background subscribers", header, rows, 3, bad, note="\n".join([note, *errors]))


def _some_events(names: str) -> str:
    """The first of several events, and how many more there are."""
    first, *others = names.split(", ")
    return f"{first} and {len(others)} more" if others else first


def lossy(subscriber: SubscriberCost) -> bool:
    """Whether it did not get, or did not manage, everything."""
    return bool(subscriber.dropped or subscriber.failed or subscriber.error)


def curves_table(curves: Sequence[Curve]) -> Table:
    """What was logged, a row a scalar and mode."""
    header = ["scalar", "mode", "records", "first", "last", "least", "at", "greatest", "at"]
    rows = [
        [
            curve.name, curve.mode, f"{curve.count:,}", value_text(curve.first), value_text(curve.last),
            value_text(curve.least), _step(curve.least_step), value_text(curve.greatest),
            _step(curve.greatest_step),
        ]
        for curve in curves
    ]  # fmt: skip
    bad = frozenset(i for i, curve in enumerate(curves) if curve.not_finite)
    note = "\n".join(
        f"{curve.mode}/{curve.name}: {curve.not_finite:,} of {curve.count:,} values are NaN or infinite, "
        f"the first at step {_step(curve.first_not_finite)}"
        for curve in curves
        if curve.not_finite
    )
    return Table("Scalars", header, rows, 2, bad, lines=[curve.mean for curve in curves], note=note)


# --- side by side ------------------------------------------------------------------------------------------


def side_by_side(reports: Sequence[Report], names: Sequence[str]) -> list[Table]:
    """Tables of several runs, with ratios to the first."""
    costs = [report.costs for report in reports]
    found = [
        _compare("Step time, ms/iteration", "phase", names, [_phase_numbers(c) for c in costs], three_digits),
        _compare(
            "Handlers, µs/iteration", "handler", names, [_handler_numbers(c) for c in costs], three_digits
        ),
        _compare("Background subscribers", "", names, [_subscriber_numbers(c) for c in costs], count_or_time),
        _compare(
            "Scalars, the last value", "scalar", names, [_curve_numbers(r) for r in reports], value_text
        ),
    ]
    return [table for table in found if table.rows]


def _compare(
    title: str,
    what: str,
    names: Sequence[str],
    numbers: Sequence[dict[str, float]],
    text: Callable[[float], str],
) -> Table:
    """A row for each name in any of `numbers`: a column a run, then one a ratio."""
    header = [what, *names, *(f"{name} / {names[0]}" for name in names[1:])]
    rows = []
    for key in dict.fromkeys(key for each in numbers for key in each):
        found = [each.get(key) for each in numbers]
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


def _handler_numbers(costs: RunCosts | None) -> dict[str, float]:
    if costs is None or not costs.phases.iterations:
        return {}
    each = by_key(costs.handlers).items()
    return {key: handler.seconds / costs.phases.iterations * 1e6 for key, handler in each}


def by_key(handlers: Sequence[HandlerCost]) -> dict[str, HandlerCost]:
    """The dearest first, by what one handler is called in two runs: its name, event and filter. Two that agree in all
    of them are told apart by their order."""
    found: dict[str, HandlerCost] = {}
    for handler in sorted((h for h in handlers if h.calls), key=lambda handler: -handler.seconds):
        key = handler.name
        if not key.endswith(f".{handler.event}"):  # a hook's method mostly has the name of its event
            key += f", {handler.event}"
        key += f" [{handler.filter}]" if handler.filter else ""
        while key in found:
            key += "'"
        found[key] = handler
    return found


def _subscriber_numbers(costs: RunCosts | None) -> dict[str, float]:
    """Counts are ints."""
    found: dict[str, float] = {}
    for s in costs.subscribers if costs is not None else []:
        found |= {
            f"{s.name}: delivered": s.delivered,
            f"{s.name}: dropped": s.dropped,
            f"{s.name}: failed": s.failed,
            f"{s.name}: backlog": s.peak_queued,
            f"{s.name}: wait p99, ms": s.wait.p99 * 1e3,
            f"{s.name}: busy p99, ms": s.busy.p99 * 1e3,
        }
    return found


def _curve_numbers(report: Report) -> dict[str, float]:
    if report.log is None:
        return {}
    return {f"{curve.mode}/{curve.name}": curve.last for curve in report.log.curves}


# --- cells -------------------------------------------------------------------------------------------------


def _milliseconds(seconds: float, phases: Phases) -> str:
    return three_digits(seconds / phases.iterations * 1e3) if phases.iterations else ABSENT


def _microseconds(seconds: float, phases: Phases) -> str:
    return three_digits(seconds / phases.iterations * 1e6) if phases.iterations else ABSENT


def _percentiles(times: Times) -> list[str]:
    return [duration(times.p50), duration(times.p99)] if times.samples else [ABSENT, ABSENT]


def _longest(times: Times) -> str:
    return duration(times.max) if times.samples else ABSENT


def _step(step: int | None) -> str:
    return ABSENT if step is None else f"{step:,}"
