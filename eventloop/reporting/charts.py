"""Prepare the charts of a report as data for plotly.js.

`html` puts them on the page. A colour is a name that begins with "@", e.g. "@run0" or "@bad": the page maps
it to a colour for a light or a dark background. Texts of a run are escaped, because plotly interprets some
HTML in every text.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

from eventloop.costs.records import PHASES, Phases, RunCosts
from eventloop.reporting.facts import median_wall, medians
from eventloop.reporting.report import Report
from eventloop.util.formatting import on_a_line, share, three_digits

RUN_COLOURS = 8
ROW = 30
"""Height of a bar in pixels."""
MEDIANS = "A bar of medians may be shorter than the median iteration: they need not add up to it."
CLIP = 4
"""Values above so many times the usual one are cut off, and labelled with the value."""

Trace = dict[str, Any]


class Chart(NamedTuple):
    """One figure of the page."""

    title: str
    data: list[Trace]
    layout: dict[str, Any]
    height: int
    kind: str = ""
    """"curve" for charts whose y-axis may become logarithmic; "" for others."""
    note: str = ""
    narrow: Sequence[str] = ()
    """The labels of the y-axis in a window as narrow as a phone's."""


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


def name_runs(names: Sequence[str], reports: Sequence[Report]) -> list[NamedRun]:
    """Pair each report with its name and a colour."""
    return [
        NamedRun(name, report, f"@run{i % RUN_COLOURS}")
        for i, (name, report) in enumerate(zip(names, reports, strict=True))
    ]


def text(value: str, width: int = 44) -> str:
    """Escape a text of a run, so that plotly shows it literally; cut it to `width` characters."""
    return html.escape(on_a_line(value, width), quote=False)


NARROW = 18


def narrow_label(name: str) -> str:
    """Return a name for a narrow axis, in one or two lines of `NARROW` characters.

    The lines are e.g. `EMAHook` and `.after_train_iter`.
    """
    plain = on_a_line(name)
    split = re.search(r"(?<=.)(\.|, )", plain)
    lines = [plain[: split.start()], plain[split.start() :].lstrip(", ")] if split else [plain]
    return "<br>".join(text(line, NARROW) for line in lines)


class Stack(NamedTuple):
    """A bar of phases stacked on each other."""

    name: str
    phases: Phases
    wall: float
    """The time of which the shares are fractions."""


def phase_chart(runs: Sequence[NamedRun]) -> Chart:
    """Return the chart of an iteration's phases: bars for each run's mean, median and time on its device."""
    bars: list[Stack] = []
    for run in runs:
        costs, name = run.costs, on_a_line(run.name, 30)
        bars.append(Stack(f"{name}, mean", costs.phases, costs.phases.wall))
        if (usual := medians(costs)) is not None:
            bars.append(Stack(f"{name}, median", usual, median_wall(costs)))
        if costs.device is not None and costs.device.iterations:
            bars.append(Stack(f"{name}, on the device", costs.device, costs.device.wall))
    data = [_phase_bar(phase, bars) for phase in PHASES if any(getattr(bar.phases, phase) for bar in bars)]
    layout = {
        "barmode": "stack",
        "showlegend": True,
        "hovermode": "closest",
        "xaxis": {"title": {"text": "ms an iteration"}, "rangemode": "tozero"},
        "yaxis": {**names_axis([text(bar.name) for bar in bars]), "showgrid": False},
        "legend": {"traceorder": "normal"},
        "uniformtext": {"mode": "hide", "minsize": 11},
    }
    height, names = 130 + ROW * 4 // 3 * len(bars), [narrow_label(bar.name) for bar in bars]
    note = MEDIANS if any(run.costs.trend for run in runs) else ""
    return Chart("Where an iteration's time goes", data, layout, height, note=note, narrow=names)


def _phase_bar(phase: str, bars: Sequence[Stack]) -> Trace:
    means = [_ms(getattr(bar.phases, phase), bar.phases) for bar in bars]
    shares = [share(getattr(bar.phases, phase), bar.wall) for bar in bars]
    wide = [mean > 0.06 * max(_ms(bar.phases.wall, bar.phases) for bar in bars) for mean in means]
    return {
        "type": "bar", "orientation": "h", "name": phase, "x": means, "y": [*range(len(bars))],
        "width": 0.62, "marker": {"color": f"@{phase}"}, "customdata": shares,
        "text": [each if show else "" for each, show in zip(shares, wide, strict=True)],
        "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
        "insidetextfont": {"color": "@inside"},
        "hovertemplate": f"{phase}: %{{x:.4g}} ms, %{{customdata}}<extra></extra>",
    }  # fmt: skip


def trend_charts(runs: Sequence[NamedRun]) -> list[Chart]:
    """Return a chart for each run of its phases over the iterations, all with the same axis.

    With several runs, a chart of whole iterations comes first.
    """
    with_trend = [run for run in runs if run.costs.trend]
    if not with_trend:
        return []
    walls = [[_ms(point.phases.wall, point.phases) for point in run.costs.trend] for run in with_trend]
    # each run has its own usual value: a slow run is not cut off because another is fast
    top = max(map(_top, walls))
    charts = [_wall_chart(with_trend, [*chain(*walls)], top)] if len(with_trend) > 1 else []
    for run, own in zip(with_trend, walls, strict=True):
        title = "The phases over the iterations" if len(runs) == 1 else run.name
        data = [_phase_area(phase, run.costs) for phase in PHASES]
        charts.append(Chart(title, data, _over_iterations(top), 320, note=_clipped_note(own, top)))
    return charts


def _wall_chart(runs: Sequence[NamedRun], walls: Sequence[float], top: float) -> Chart:
    data: list[Trace] = []
    for run in runs:
        steps, means = _stairs(run.costs, "wall")
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": text(run.name), "x": steps, "y": means,
                "line": {"shape": "hv", "color": run.colour, "width": 1.8}, "hovertemplate": "%{y:.4g} ms",
            }
        )  # fmt: skip
    layout = _over_iterations(top)
    return Chart("An iteration, over each run", data, layout, 320, note=_clipped_note(walls, top))


def _phase_area(phase: str, costs: RunCosts) -> Trace:
    steps, means = _stairs(costs, phase)
    return {
        "type": "scatter", "mode": "lines", "stackgroup": "phases", "name": phase, "x": steps, "y": means,
        "line": {"shape": "hv", "width": 0, "color": f"@{phase}"}, "fillcolor": f"@{phase}",
        "hovertemplate": "%{y:.4g} ms",
    }  # fmt: skip


def _stairs(costs: RunCosts, phase: str) -> tuple[list[int], list[float]]:
    """Return the begin and the mean of each point; the end of the last one closes the line."""
    points = [point for point in costs.trend if point.phases.iterations]
    means = [rounded(_ms(getattr(point.phases, phase), point.phases)) for point in points]
    end = points[-1].first_iter + points[-1].phases.iterations
    return [*(point.first_iter for point in points), end], [*means, means[-1]]


def _over_iterations(top: float) -> dict[str, Any]:
    return {
        "hovermode": "x unified",
        "showlegend": True,
        "xaxis": count_axis("iteration"),
        "yaxis": {
            "title": {"text": "ms an iteration"},
            "range": [0, top * 1.06 or 1.0],
        },
        "legend": {"traceorder": "normal"},
    }


def _top(values: Sequence[float]) -> float:
    """Return the end of an axis that shows usual values.

    It is the greatest value, unless that is more than `CLIP` times the median.
    """
    usual = CLIP * median(values)
    return (
        max((value for value in values if value <= usual), default=max(values))
        if max(values) > usual
        else max(values)
    )


def _clipped_note(values: Sequence[float], top: float) -> str:
    count = sum(value > top for value in values)
    if not count:
        return ""
    points = "1 point is" if count == 1 else f"{count} points are"
    longest = three_digits(max(values))
    return f"{points} beyond the axis, up to {longest} ms; “Autoscale” above the chart shows all."


def count_axis(what: str) -> dict[str, Any]:
    """Return an axis of counts, which shows 20,000 as 20k.

    If it has few numbers, ticks between two of them read 0.5, not 500m.
    """
    few = {"dtickrange": [None, 0.9], "value": "~f"}
    return {"title": {"text": what}, "tickformat": "~s", "tickformatstops": [few], "hoverformat": ",d"}


def names_axis(names: Sequence[str]) -> dict[str, Any]:
    """Return an axis of names from top to bottom; several names may be equal."""
    return {
        "tickvals": [*range(len(names))],
        "ticktext": list(names),
        "range": [len(names) - 0.5, -0.5],
        "fixedrange": True,
    }


def _ms(seconds: float, phases: Phases) -> float:
    return rounded(seconds / phases.iterations * 1e3) if phases.iterations else 0.0


def rounded(number: float) -> float:
    """Round to as many digits as a screen shows, which halves the page's bytes."""
    return float(f"{number:.6g}")
