"""Draw the charts of a report with plotly.

`html` puts them on the page. Importing this module imports plotly. Texts of a run are escaped by `text`,
because plotly interprets some HTML in every text.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from eventloop.costs.records import PHASES, HandlerCost, RunCosts, SubscriberCost, Times
from eventloop.reporting.curves import Curve
from eventloop.reporting.report import Report
from eventloop.reporting.tables import by_key, with_includes, with_unit
from eventloop.reporting.trend import medians, trend
from eventloop.util.formatting import duration, on_a_line, share, three_digits

RUN_COLOURS = ("#2f6fde", "#d9730d", "#1b9663", "#b8388a", "#7650cf", "#0c8fa3", "#8a5a2b", "#6b7686")
PHASE_COLOURS = {
    "data": "#d98a1f", "forward": "#3f83d6", "backward": "#2a5796", "optimizer": "#7a5cc4",
    "hooks": "#15967b", "unaccounted": "#8e98a6",
}  # fmt: skip
BAD = "#d23b3b"
GREY = "#8e98a6"
DASHES = {"train": "solid", "val": "dash", "test": "dot"}
COUNTED = {"longest queue": "peak_queued", "dropped": "dropped", "failed": "failed", "left": "queued"}
CLIP = 4
"""The phases are shown up to so many times the usual iteration; rare long ones are beyond the axis."""
FEW = 80
"""The largest number of points that are drawn with markers."""
MOST_HANDLERS = 20
ROW = 34
"""Height of a bar in pixels."""
LEAST = 1e-7
"""Shortest time on a logarithmic axis, in seconds; shorter times are drawn there."""
MEDIANS = "A bar of medians may be shorter than the median iteration: they need not add up to it."


class NamedRun(NamedTuple):
    """A run with its name and its colour on the page."""

    name: str
    report: Report
    colour: str

    @property
    def costs(self) -> RunCosts:
        """Return the costs of the run, which must have some."""
        assert self.report.costs is not None
        return self.report.costs


class Chart(NamedTuple):
    """A figure of the page, and a remark below it."""

    title: str
    figure: go.Figure
    note: str = ""


def name_runs(names: Sequence[str], reports: Sequence[Report]) -> list[NamedRun]:
    """Pair each report with its name and a colour."""
    return [
        NamedRun(name, report, RUN_COLOURS[number % len(RUN_COLOURS)])
        for number, (name, report) in enumerate(zip(names, reports, strict=True))
    ]


def text(value: str, width: int = 44) -> str:
    """Escape a text of a run, so that plotly shows it literally; cut it to `width` characters."""
    return html.escape(on_a_line(value, width), quote=False)


def _lay_out(figure: go.Figure, height: int, **layout: Any) -> None:
    figure.update_layout(
        template="none", height=height, margin={"l": 10, "r": 10, "t": 40, "b": 10},
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "traceorder": "normal"},
    )  # fmt: skip
    figure.update_layout(**layout).update_xaxes(automargin=True).update_yaxes(automargin=True, zeroline=False)


def _names_axis(names: Sequence[str]) -> dict[str, Any]:
    """Return a y-axis of names from top to bottom; several names may be equal."""
    rows = [*range(len(names))]
    ticks = {"tickvals": rows, "ticktext": [text(name) for name in names]}
    return {**ticks, "range": [len(rows) - 0.5, -0.5], "showgrid": False}


def phase_charts(runs: Sequence[NamedRun]) -> list[Chart]:
    """Return the charts of the phases, in an iteration and over the iterations; none without runs."""
    return [_phase_chart(runs), *_trend_charts(runs)] if runs else []


def _phase_chart(runs: Sequence[NamedRun]) -> Chart:
    """Return the chart of an iteration's phases: bars for each run's mean, median and time on its device."""
    bars: list[tuple[str, dict[str, float]]] = []  # a name, and seconds of an iteration by phase
    for run in runs:
        for what, phases in (("mean", run.costs.phases), ("on the device", run.costs.device)):
            if phases is not None and phases.iterations:
                each = {phase: getattr(phases, phase) / phases.iterations for phase in (*PHASES, "wall")}
                bars.append((f"{run.name}, {what}", each))
        if usual := medians(run.costs):
            bars.append((f"{run.name}, median", usual))
    figure = go.Figure()
    for phase in PHASES:
        shares = [share(seconds[phase], seconds["wall"]) for _, seconds in bars]
        figure.add_bar(
            x=[seconds[phase] * 1e3 for _, seconds in bars], y=[*range(len(bars))], orientation="h",
            name=phase, text=shares, textposition="inside", textangle=0, marker_color=PHASE_COLOURS[phase],
            hovertemplate=f"{phase}: %{{x:.4g}} ms, %{{text}}<extra></extra>",
        )  # fmt: skip
    _lay_out(
        figure, 130 + ROW * len(bars), barmode="stack", xaxis_title="ms an iteration",
        uniformtext={"mode": "hide", "minsize": 11}, yaxis=_names_axis([name for name, _ in bars]),
    )  # fmt: skip
    note = MEDIANS if any(run.costs.trend for run in runs) else ""
    return Chart("Where an iteration's time goes", figure, note)


def _trend_charts(runs: Sequence[NamedRun]) -> list[Chart]:
    """Return a chart for each run of its phases over the iterations, all with the same axis."""
    shown = [run for run in runs if trend(run.costs, "wall")]
    walls = [[seconds * 1e3 for seconds in trend(run.costs, "wall")] for run in shown]
    # each run has its own usual value: a slow run is not cut off because another is fast
    top = max((min(max(wall), CLIP * median(wall)) for wall in walls), default=0.0)
    charts = []
    for run, wall in zip(shown, walls, strict=True):
        figure = go.Figure()
        starts = [point.first_iter for point in run.costs.trend if point.phases.iterations]
        for phase in PHASES:
            figure.add_scatter(
                x=starts, y=[seconds * 1e3 for seconds in trend(run.costs, phase)], name=phase, mode="lines",
                stackgroup="phases", line={"shape": "hv", "width": 0}, fillcolor=PHASE_COLOURS[phase],
                hovertemplate="%{y:.4g} ms",
            )  # fmt: skip
        _lay_out(
            figure, 320, hovermode="x unified", xaxis_title="iteration", yaxis_title="ms an iteration",
            yaxis_range=[0, top * 1.06 or 1.0],
        )  # fmt: skip
        title = "The phases over the iterations" if len(runs) == 1 else f"{run.name}: phases over iterations"
        clipped = f"Points up to {three_digits(max(wall))} ms are beyond the axis; “Autoscale” shows all."
        charts.append(Chart(title, figure, clipped if max(wall) > top else ""))
    return charts


def handler_charts(runs: Sequence[NamedRun]) -> list[Chart]:
    """Return the chart of the most expensive handlers of an iteration, a bar for each run.

    The list is empty without a bar to draw. Handlers that run other phases are not comparable: a note names
    them.
    """
    found = [by_key([h for h in run.costs.handlers if h.in_iteration]) for run in runs]
    microseconds = [
        {key: h.seconds / run.costs.phases.iterations * 1e6 for key, h in handlers.items() if not h.includes}
        for run, handlers in zip(runs, found, strict=True)
    ]
    most = {key: max(each.get(key, 0.0) for each in microseconds) for each in microseconds for key in each}
    keys = sorted(most, key=lambda key: -most[key])[:MOST_HANDLERS]
    if not keys:
        return []
    figure = go.Figure()
    for run, handlers, each in zip(runs, found, microseconds, strict=True):
        shown = [(row, key, handlers[key]) for row, key in enumerate(keys) if key in each]
        figure.add_bar(
            x=[each[key] for _, key, _ in shown], y=[row for row, *_ in shown], orientation="h",
            name=text(run.name), texttemplate="%{x:,.3r}", textposition="outside",
            marker={"color": [BAD if handler.over_budget else run.colour for *_, handler in shown]},
            hovertext=[_hover(text(key, 90), handler.times, handler.budget) for _, key, handler in shown],
            hovertemplate="%{x:,.4g} µs an iteration<br>%{hovertext}<extra></extra>",
        )  # fmt: skip
    _lay_out(
        figure, 130 + max(ROW, 18 * len(runs)) * len(keys), barmode="group", showlegend=len(runs) > 1,
        xaxis_title="µs an iteration, mean", yaxis=_names_axis(keys),
    )  # fmt: skip
    return [Chart("What each handler adds to an iteration", figure, _handler_note(found, len(most)))]


def _handler_note(found: Sequence[dict[str, HandlerCost]], drawable: int) -> str:
    """Return what the chart of handlers does not show, and what red means in it."""
    every = [(key, handler) for handlers in found for key, handler in handlers.items()]
    left_out = dict.fromkeys(with_includes(handler, key) for key, handler in every if handler.includes)
    notes = []
    if drawable > MOST_HANDLERS:
        notes.append(f"The {MOST_HANDLERS} most expensive of {drawable}; the table has all.")
    if any(handler.over_budget for _, handler in every):
        notes.append("Red: over its budget.")
    if left_out:
        notes.append(f"Not drawn: {', '.join(left_out)}.")
    return " ".join(notes)


def _hover(what: str, times: Times, budget: float | None) -> str:
    spread = f"p50 {duration(times.p50)}, p99 {duration(times.p99)}, max {duration(times.max)}"
    limit = "" if budget is None else f"<br>its budget for p99: {duration(budget)}"
    return f"{what}<br>{spread}, {times.samples:,} samples{limit}"


def subscriber_charts(runs: Sequence[NamedRun]) -> list[Chart]:
    """Return a chart for each run: waits, deliveries, queue lengths and lost events of its subscribers."""
    charts = []
    for run in runs:
        if not (rows := run.costs.subscribers):
            continue
        figure = make_subplots(1, 2, column_widths=[0.6, 0.4], shared_yaxes=True)
        _add_times(figure, "wait from the emit", -0.15, [row.wait for row in rows], rows)
        _add_times(figure, "delivery", 0.15, [row.busy for row in rows], rows)
        for number, (name, field) in enumerate(COUNTED.items()):
            figure.add_bar(
                x=[getattr(row, field) for row in rows], y=[*range(len(rows))], orientation="h", name=name,
                marker_color=(GREY, BAD, "#8c1d40", "#b8388a")[number], row=1, col=2,
            )  # fmt: skip
        _lay_out(
            figure, 130 + 2 * ROW * len(rows), barmode="group", yaxis=_names_axis([row.name for row in rows]),
            xaxis={"type": "log", "title": "seconds of a wait or a delivery, p50 to p99"},
            xaxis2={"title": "events"},
        )  # fmt: skip
        title = "Wait from the emit to the delivery, deliveries, and queues"
        charts.append(Chart(title if len(runs) == 1 else f"{run.name}: {title}", figure))
    return charts


def _add_times(
    figure: go.Figure, what: str, shift: float, times: Sequence[Times], rows: Sequence[SubscriberCost]
) -> None:
    """Add a point at p50 with a line to p99 for each subscriber with measured times."""
    measured = [(i, each) for i, each in enumerate(times) if each.samples]
    busy = what == "delivery"  # a budget is the limit of deliveries
    colours = [BAD if row.over_budget else RUN_COLOURS[0] for row in rows] if busy else [GREY] * len(rows)
    figure.add_scatter(
        name=what, mode="markers", x=[max(LEAST, each.p50) for _, each in measured],
        y=[i + shift for i, _ in measured],
        error_x={
            "array": [max(0.0, each.p99 - each.p50) for _, each in measured],
            "arrayminus": [0] * len(measured), "color": GREY,
        },
        marker={"size": 10, "color": [colours[i] for i, _ in measured]},
        hovertext=[
            _hover(f"{text(rows[i].name)}, {what}", each, rows[i].budget if busy else None)
            for i, each in measured
        ],
        hovertemplate="%{hovertext}<extra></extra>", row=1, col=1,
    )  # fmt: skip


def scalar_charts(runs: Sequence[NamedRun]) -> list[Chart]:
    """Return a chart for each scalar, with its modes and all runs."""
    found: dict[str, list[tuple[NamedRun, Curve]]] = {}
    for run in runs:
        for curve in run.report.log.curves if run.report.log is not None else []:
            found.setdefault(curve.name, []).append((run, curve))
    return [_scalar_chart(name, members, alone=len(runs) == 1) for name, members in found.items()]


def _scalar_chart(name: str, members: Sequence[tuple[NamedRun, Curve]], *, alone: bool) -> Chart:
    figure = go.Figure()
    for number, (run, curve) in enumerate(members):
        colour = RUN_COLOURS[number % len(RUN_COLOURS)] if alone else run.colour
        label = text(curve.mode) if alone else f"{text(run.name, 30)} {text(curve.mode)}"
        line = {
            "color": colour,
            "width": 1.6,
            "dash": "solid" if alone else DASHES.get(curve.mode, "dashdot"),
        }
        band = {"x": curve.steps, "mode": "lines", "line_width": 0, "hoverinfo": "skip", "showlegend": False}
        if curve.low:  # the least and the greatest values that each point stands for
            figure.add_scatter(**band, y=curve.low, legendgroup=label)
            figure.add_scatter(
                **band, y=curve.high, legendgroup=label, fill="tonexty", fillcolor=_pale(colour)
            )
        figure.add_scatter(
            x=curve.steps, y=curve.mean, name=label, legendgroup=label, line=line, hovertemplate="%{y:.5g}",
            mode="lines+markers" if len(curve.steps) <= FEW else "lines",
        )  # fmt: skip
        if curve.first_not_finite is not None:
            figure.add_vline(
                curve.first_not_finite, line={"color": BAD, "dash": "dot"},
                annotation_text=f"{label}: {curve.not_finite:,} NaN or inf", annotation_font_color=BAD,
            )  # fmt: skip
    kinds = [
        {"label": k, "method": "relayout", "args": [{"yaxis.type": k, "yaxis.autorange": True}]}
        for k in ("linear", "log")
    ]
    _lay_out(
        figure, 300, hovermode="x unified", showlegend=len(members) > 1, xaxis_title="step",
        updatemenus=[{"buttons": kinds, "type": "buttons", "direction": "right", "x": 1, "y": -0.2}],
    )  # fmt: skip
    return Chart(with_unit(name), figure)


def _pale(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.22)"
