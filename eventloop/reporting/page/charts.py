"""Draw the charts of a report with plotly.

`html` puts them on the page. Importing this module imports plotly. Plotly interprets some HTML tags in every
string, so names that come from a run must be escaped by `text`.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from math import floor, log, log10
from statistics import median
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from eventloop.costs.records import PHASES, WAITS, HandlerCost, RunCosts, Times, phase_names
from eventloop.costs.step_clock import TIMES
from eventloop.costs.trend import medians, trend
from eventloop.reporting.curves import Curve
from eventloop.reporting.facts import PHASE_COLOURS, RUN_COLOURS
from eventloop.reporting.report import Report
from eventloop.reporting.run_tables import (
    MATTERS,
    by_key,
    phase_name,
    with_includes,
    with_unit,
)
from eventloop.util.formatting import duration, on_a_line, share, three_digits

BAD = "#d23b3b"
GREY = "#8e98a6"
_TICKS = [factor * 10.0**power for power in range(-7, 5) for factor in (1, 2, 5)]
"""The possible ticks of an axis of step times, in seconds."""
_ABOVE = {"type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
_ABOVE |= {"pad": {"b": 4, "t": 0, "l": 0, "r": 0}}
"""The position of a chart's buttons: above the chart at the left, because plotly's are at the right."""
_LEGEND = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "traceorder": "normal"}
_CLEAR = "rgba(0,0,0,0)"
DASHES = {"train": "solid", "val": "dash", "test": "dot"}
CLIP = 4
"""The axis of a chart of phases ends at this multiple of the median iteration; a button shows the rest."""
BUTTONS = 34
"""The height in pixels of the space for buttons above a chart."""
FEW = 80
"""A curve of at most this many points is drawn with markers."""
MOST_HANDLERS = 20
"""The largest number of handlers that are drawn."""
FEWEST_HANDLERS = 5
"""This many handlers are drawn even if they take less than 1 % of an iteration."""
NAME = 22
"""The height in pixels of a name above its bars."""
BAR = 18
"""The height of a bar in pixels."""
BIN = 1.1
"""The ratio of the upper to the lower edge of a bin in the histogram of step times."""
PERCENTILES = ("p50", "p90", "p99")
LABEL = 0.13
"""The height of the label of a percentile, as a part of the height of its chart."""
MEDIANS = "A bar of medians may be shorter than the median iteration: they need not add up to it."


class NamedRun(NamedTuple):
    """Hold a run's report with the name and the colour of the run on the page."""

    name: str
    report: Report
    colour: str

    @property
    def costs(self) -> RunCosts:
        """The costs of the run, which must have costs."""
        assert self.report.costs is not None
        return self.report.costs


class Chart(NamedTuple):
    """Hold a figure of the page, with its title and a remark below it."""

    title: str
    figure: go.Figure
    note: str = ""


def name_runs(names: Sequence[str], reports: Sequence[Report]) -> list[NamedRun]:
    """Return each report with its name and a colour."""
    return [
        NamedRun(name, report, RUN_COLOURS[number % len(RUN_COLOURS)])
        for number, (name, report) in enumerate(zip(names, reports, strict=True))
    ]


def text(value: str, width: int = 44) -> str:
    """Escape the HTML in a text that comes from a run, and cut the text to `width` characters."""
    return html.escape(on_a_line(value, width), quote=False)


def _lay_out(figure: go.Figure, height: int, **layout: Any) -> None:
    """Set the options that all charts share, with space for buttons at the top and the legend at the bottom.

    Args:
        height: the height in pixels.
        layout: other options of plotly's layout.
    """
    margin = {"l": 10, "r": 10, "t": BUTTONS, "b": 10}
    figure.update_layout(template="none", height=height, margin=margin, legend=_LEGEND)
    figure.update_layout(paper_bgcolor=_CLEAR, plot_bgcolor=_CLEAR, **layout)
    figure.update_xaxes(automargin=True).update_yaxes(automargin=True, zeroline=False)


class _Rows:
    """Compute the layout of a bar chart in which each row has a name and horizontal bars below it.

    A row is 1 high in units of the y-axis. Its bars begin at the integer that is its number.

    Args:
        names: the names of the rows.
        bars: the number of bars in a row.
    """

    def __init__(self, names: Sequence[str], bars: int) -> None:
        rows, row_pixels = [*range(len(names))], NAME + BAR * bars
        self.pixels = row_pixels * len(names) + 150
        """The height of the chart in pixels, with the x-axis and the buttons."""
        self.width = BAR / row_pixels
        """The thickness of a bar, in units of the y-axis."""
        self.axis: dict[str, Any] = {"tickvals": rows, "ticktext": [text(name) for name in names]}
        """The options of the y-axis, which has the names from top to bottom; several may be equal."""
        bars_height = self.width * bars
        self.axis |= {"range": [len(rows) - 1 + bars_height, bars_height - 1], "showgrid": False}
        self.axis |= {"ticks": "", "ticklabelposition": "inside top"}


def phase_charts(runs: Sequence[NamedRun]) -> list[Chart]:
    """Return the charts of the iterations: phases, histogram of times, and phases over the run."""
    if not runs:
        return []
    return [_phase_chart(runs), *_step_time_charts(runs), *_trend_charts(runs)]


def _phase_chart(runs: Sequence[NamedRun]) -> Chart:
    """Return the chart of an iteration's phases, with bars for each run's mean, device and median times."""
    bars: dict[str, dict[str, float]] = {}  # by the name of a bar, seconds per iteration by phase
    for run in runs:
        for kind, phases in (("mean", run.costs.phases), ("on the device", run.costs.device)):
            if phases is not None and (number := phases.iterations):
                names = (*PHASES, *WAITS, "wall")
                bars[f"{run.name}, {kind}"] = {name: getattr(phases, name) / number for name in names}
        if usual := medians(run.costs):
            bars[f"{run.name}, median"] = usual
    figure, rows = go.Figure(), _Rows([*bars], 1)
    shown = phase_names(*(run.costs.phases for run in runs))
    for phase in shown:
        figure.add_bar(
            x=[seconds[phase] * 1e3 for seconds in bars.values()],
            y=[*range(len(bars))],
            orientation="h",
            name=phase_name(phase),
            text=[share(seconds[phase], seconds["wall"]) for seconds in bars.values()],
            textposition="inside",
            textangle=0,
            marker_color=PHASE_COLOURS[phase],
            offset=0,
            width=rows.width,
            hovertemplate=f"{phase_name(phase)}: %{{x:.4g}} ms, %{{text}}<extra></extra>",
        )
    longest = max(sum(seconds[phase] for phase in shown) for seconds in bars.values()) * 1e3
    layout = {"barmode": "stack", "xaxis_title": "ms an iteration", "xaxis_range": [0, longest or 1.0]}
    _lay_out(figure, rows.pixels, uniformtext={"mode": "hide", "minsize": 11}, yaxis=rows.axis, **layout)
    note = MEDIANS if any(run.costs.trend for run in runs) else ""
    return Chart("Where an iteration's time goes", figure, note)


def _step_time_charts(runs: Sequence[NamedRun]) -> list[Chart]:
    """Return one chart with a histogram of step times for each run; [] if no cost record has a histogram."""
    shown = [run for run in runs if run.costs.histogram]
    if not shown:
        return []
    several = len(runs) > 1
    titles = [text(run.name) for run in shown] if several else None
    figure = make_subplots(
        len(shown), 1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.3 / len(shown)
    )
    figure.update_annotations(x=0, xanchor="left")
    for row, run in enumerate(shown, 1):
        edges, counts = _bins(run.costs.histogram)
        pairs = zip(edges, counts, strict=True)
        figure.add_scatter(
            x=[log10(edge) for edge in edges],
            y=counts,
            name=text(run.name),
            mode="lines",
            fill="tozeroy",
            line={"shape": "hv", "width": 1, "color": run.colour},
            hovertext=[f"{duration(edge)} to {duration(edge * BIN)}: {n:,} iterations" for edge, n in pairs],
            hovertemplate="%{hovertext}<extra></extra>",
            row=row,
            col=1,
        )
        highest = max(counts) / (1 - LABEL * len(PERCENTILES)) if run.costs.iteration.samples else None
        figure.update_yaxes(range=[0, highest], row=row, col=1)
        _add_percentiles(figure, run.costs.iteration, row, middle=log10(edges[0] * edges[-1]) / 2)
    ends = [edge for run in shown for edge, _ in run.costs.histogram]
    ticks = [seconds for seconds in _TICKS if min(ends) / 2 <= seconds <= max(ends) * 2]
    _lay_out(figure, 90 + 150 * len(shown) + 60 * (not several), showlegend=False)
    figure.update_xaxes(tickvals=[log10(t) for t in ticks], ticktext=[duration(t) for t in ticks])
    figure.update_xaxes(title="time of one iteration", row=len(shown), col=1).update_yaxes(title="iterations")
    return [Chart("How long single iterations take", figure)]


def _bins(histogram: Sequence[tuple[float, int]]) -> tuple[list[float], list[int]]:
    """Return lower edges in seconds and counts of bins without gaps, with an empty bin at each end."""
    counts: Counter[int] = Counter()  # the exponent of a bin's lower edge, to the base `BIN`
    for edge, count in histogram:
        counts[floor(log(edge, BIN) + 1e-6)] += count  # rounding may have made an edge slightly smaller
    exponents = range(min(counts) - 1, max(counts) + 2)
    return [BIN**exponent for exponent in exponents], [counts[exponent] for exponent in exponents]


def _add_percentiles(figure: go.Figure, times: Times, row: int, *, middle: float) -> None:
    """Add a vertical line with a label for each percentile of the step times.

    The labels are above the histogram, each lower than the one before it, on the side of their line that
    faces the middle.

    Args:
        middle: the middle of the x-axis.
    """
    for number, name in enumerate(PERCENTILES if times.samples else ()):
        x = log10(seconds) if (seconds := getattr(times, name)) > 0 else middle  # 0 s has no logarithm
        figure.add_vline(x, line={"color": GREY, "dash": "dot", "width": 1.5}, row=row, col=1)
        position = {"x": x, "xanchor": "left" if x <= middle else "right", "y": 1 - LABEL * number}
        position |= {"yref": "y domain", "yanchor": "top"}
        figure.add_annotation(position, text=f"{name} {duration(seconds)}", showarrow=False, row=row, col=1)


def _trend_charts(runs: Sequence[NamedRun]) -> list[Chart]:
    """Return a chart of the phases over the iterations for each run, all with the same y-axis."""
    shown = [run for run in runs if trend(run.costs, "wall")]
    walls = [[seconds * 1e3 for seconds in trend(run.costs, "wall")] for run in shown]
    # the limit uses each run's own median, so that a fast run does not cut off a slow one
    top = max((min(max(wall), CLIP * median(wall)) for wall in walls), default=0.0)
    charts = []
    for run, wall in zip(shown, walls, strict=True):
        figure = go.Figure()
        starts = [point.first_iter for point in run.costs.trend if point.phases.iterations]
        for phase in phase_names(run.costs.phases):
            figure.add_scatter(
                x=starts,
                y=[seconds * 1e3 for seconds in trend(run.costs, phase)],
                name=phase_name(phase),
                mode="lines",
                stackgroup="phases",
                line={"shape": "hv", "width": 0},
                fillcolor=PHASE_COLOURS[phase],
                hovertemplate="%{y:.4g} ms",
            )
        titles = {"xaxis_title": "iteration", "yaxis_title": "ms an iteration"}
        height, highest = 320 if len(runs) == 1 else 260, top * 1.06 or 1.0
        _lay_out(figure, height, hovermode="x unified", **titles, yaxis_range=[0, highest])
        title = "The phases over the iterations" if len(runs) == 1 else f"{run.name}: phases over iterations"
        clipped = f"Points up to {three_digits(max(wall))} ms are beyond the axis; “Autoscale” shows all."
        charts.append(Chart(title, figure, clipped if max(wall) > top else ""))
    return charts


def handler_charts(runs: Sequence[NamedRun]) -> list[Chart]:
    """Return a chart of the most expensive handlers of an iteration, with a bar for each run, or [].

    A handler whose time includes other phases is not comparable, so a note names it in place of a bar.
    """
    handlers_by_run = [by_key(run.costs, inside=True) for run in runs]
    times_by_run = [_microseconds(run.costs) for run in runs]
    longest = {key: max(times.get(key, 0.0) for times in times_by_run) for run in times_by_run for key in run}
    keys = _drawn_handlers(longest, runs)
    if not keys:
        return []
    rows = _Rows(keys, len(runs))
    figure = go.Figure()
    columns = zip(runs, handlers_by_run, times_by_run, strict=True)
    for number, (run, handlers, times) in enumerate(columns):
        shown = {row: handlers[key] for row, key in enumerate(keys) if key in times}
        figure.add_bar(
            x=[times[keys[row]] for row in shown],
            y=[*shown],
            orientation="h",
            name=text(run.name),
            texttemplate="%{x:,.3r}",
            textposition="outside",
            cliponaxis=False,
            offset=number * rows.width,
            width=rows.width,
            marker={"color": [BAD if handler.over_budget else run.colour for handler in shown.values()]},
            hovertext=[_hover(text(keys[row], 90), h.times, h.budget) for row, h in shown.items()],
            hovertemplate="%{x:,.4g} µs an iteration<br>%{hovertext}<extra></extra>",
        )
    layout = {"xaxis_title": "µs an iteration, mean", "yaxis": rows.axis}
    axis_range = [0, 1.15 * longest[keys[0]] or 1.0]  # with space for the number beside the longest bar
    _lay_out(figure, rows.pixels, showlegend=len(runs) > 1, **layout, xaxis_range=axis_range)
    note = _handler_note(handlers_by_run, len(longest) - len(keys))
    return [Chart("What each handler adds to an iteration", figure, note)]


def _microseconds(costs: RunCosts) -> dict[str, float]:
    """Return the mean µs per iteration of each handler that can have a bar, by key."""
    return {
        key: handler.seconds / costs.phases.iterations * 1e6
        for key, handler in by_key(costs, inside=True).items()
        if handler.calls > 1 and not handler.includes
    }


def _drawn_handlers(longest: dict[str, float], runs: Sequence[NamedRun]) -> list[str]:
    """Return the keys of the handlers that are drawn, the most expensive first.

    Args:
        longest: for each handler the µs per iteration of the run in which it takes longest.
    """
    means = [run.costs.phases.wall / run.costs.phases.iterations * 1e6 for run in runs]
    least = MATTERS * min(means, default=0.0)
    ranked = sorted(longest, key=lambda key: -longest[key])[:MOST_HANDLERS]
    return [key for number, key in enumerate(ranked) if number < FEWEST_HANDLERS or longest[key] >= least]


def _handler_note(handlers_by_run: Sequence[dict[str, HandlerCost]], others: int) -> str:
    """Return the note below the chart of handlers, on handlers that are not drawn and the meaning of red.

    Args:
        others: the number of handlers that are too inexpensive for the chart.
    """
    every = [(key, handler) for handlers in handlers_by_run for key, handler in handlers.items()]
    left_out = dict.fromkeys(with_includes(handler, key) for key, handler in every if handler.includes)
    notes = {
        f"{others:,} less expensive ones are in the table alone.": others > 0,
        "Red: over its budget.": any(handler.over_budget for _, handler in every),
        f"Not drawn: {', '.join(left_out)}.": bool(left_out),
    }
    return " ".join(note for note, holds in notes.items() if holds)


def _hover(name: str, times: Times, budget: float | None) -> str:
    """Return the text that the mouse shows over a handler's bar: its name, percentiles and budget."""
    percentiles = f"p50 {duration(times.p50)}, p99 {duration(times.p99)}, max {duration(times.max)}"
    limit = "" if budget is None else f"<br>its budget for p99: {duration(budget)}"
    return f"{name}<br>{percentiles}, {times.samples:,} samples{limit}"


def scalar_charts(runs: Sequence[NamedRun]) -> list[Chart]:
    """Return a chart for each logged scalar, with a line for each mode and run."""
    curves: dict[str, list[tuple[NamedRun, Curve]]] = {}
    for run in runs:
        for curve in run.report.log.curves if run.report.log is not None else []:
            curves.setdefault(curve.name, []).append((run, curve))
    names = sorted(curves, key=lambda name: name in (*TIMES, "lr"))  # times and learning rates last
    return [_scalar_chart(name, curves[name], alone=len(runs) == 1) for name in names]


def _scalar_chart(name: str, members: Sequence[tuple[NamedRun, Curve]], *, alone: bool) -> Chart:
    """Return the chart of one scalar; `alone` means that all curves are those of one run."""
    figure = go.Figure()
    for number, (run, curve) in enumerate(members):
        colour = RUN_COLOURS[number % len(RUN_COLOURS)] if alone else run.colour
        label = text(curve.mode) if alone else f"{text(run.name, 30)} {text(curve.mode)}"
        dash = "solid" if alone else DASHES.get(curve.mode, "dashdot")
        band = {"x": curve.steps, "mode": "lines", "line_width": 0, "hoverinfo": "skip", "showlegend": False}
        band["legendgroup"] = label
        if curve.low:  # a band between the least and the greatest record of each point
            figure.add_scatter(**band, y=curve.low)
            figure.add_scatter(**band, y=curve.high, fill="tonexty", fillcolor=_pale(colour))
        figure.add_scatter(
            x=curve.steps,
            y=curve.mean,
            name=label,
            legendgroup=label,
            line={"color": colour, "width": 1.6, "dash": dash},
            hovertemplate="%{y:.5g}",
            mode="lines+markers" if len(curve.steps) <= FEW else "lines",
        )
        if curve.first_not_finite is not None:
            note = f"{label}: {curve.not_finite:,} NaN or inf"
            line = {"color": BAD, "dash": "dot"}
            step = curve.first_not_finite
            figure.add_vline(step, line=line, annotation_text=note, annotation_font_color=BAD)
    scale_buttons = [
        {"label": scale, "method": "relayout", "args": [{"yaxis.type": scale, "yaxis.autorange": True}]}
        for scale in ("linear", "log")
    ]
    menus = [{"buttons": scale_buttons, **_ABOVE}]
    legend = len(members) > 1
    _lay_out(figure, 300, hovermode="x unified", showlegend=legend, xaxis_title="step", updatemenus=menus)
    return Chart(with_unit(name), figure)


def _pale(colour: str) -> str:
    """Return a colour, given as "#rrggbb", as a transparent one for the band around a curve."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.22)"
