"""The charts of a report, as data for plotly.js.

A colour is a name that begins with "@", e.g. "@run0" or "@bad": the page knows what it is in the light and in the dark.
Texts of a run are escaped, because plotly reads some HTML in every text.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from eventloop.costs import PHASES, Phases, RunCosts
from eventloop.report import Report
from eventloop.report_tables import by_key, over_budget
from eventloop.units import duration, on_a_line, share, three_digits

RUN_COLOURS = 8
ROW = 30
"""Pixels of a bar."""
CLIP = 4
"""Whatever is longer than so many of what is usual is cut off, and says how long it is."""

Trace = dict[str, Any]


class Chart(NamedTuple):
    """One figure of the page."""

    title: str
    data: list[Trace]
    layout: dict[str, Any]
    height: int
    kind: str = ""
    """"curve" for those whose y-axis may become logarithmic."""
    note: str = ""


class Named(NamedTuple):
    """A run and what it is called."""

    name: str
    report: Report
    colour: str

    @property
    def costs(self) -> RunCosts:
        """There must be some."""
        assert self.report.costs is not None
        return self.report.costs


def named(names: Sequence[str], reports: Sequence[Report]) -> list[Named]:
    """The runs, in their colours."""
    return [
        Named(name, report, f"@run{i % RUN_COLOURS}")
        for i, (name, report) in enumerate(zip(names, reports, strict=True))
    ]


def text(value: str, width: int = 44) -> str:
    """A run's text as plotly shows it literally."""
    return html.escape(on_a_line(value, width), quote=False)


def breakdown(runs: Sequence[Named]) -> Chart:
    """A bar a run, and one for what was measured on its device: the phases, one after the other."""
    bars: list[tuple[str, Phases]] = []
    for run in runs:
        bars.append((text(run.name), run.costs.phases))
        if run.costs.device is not None and run.costs.device.iterations:
            bars.append((f"{text(run.name, 30)}, on the device", run.costs.device))
    data = [_phase_bar(phase, bars) for phase in PHASES if any(getattr(bar, phase) for _, bar in bars)]
    layout = {
        "barmode": "stack",
        "showlegend": True,
        "hovermode": "closest",
        "xaxis": {"title": {"text": "ms an iteration"}, "rangemode": "tozero"},
        "yaxis": {**names_axis([name for name, _ in bars]), "showgrid": False},
        "legend": {"traceorder": "normal"},
        "uniformtext": {"mode": "hide", "minsize": 11},
    }
    return Chart("Where an iteration's time goes", data, layout, 130 + ROW * 4 // 3 * len(bars))


def _phase_bar(phase: str, bars: Sequence[tuple[str, Phases]]) -> Trace:
    means = [_ms(getattr(phases, phase), phases) for _, phases in bars]
    shares = [share(getattr(phases, phase), phases.wall) for _, phases in bars]
    wide = [mean > 0.06 * max(_ms(phases.wall, phases) for _, phases in bars) for mean in means]
    return {
        "type": "bar", "orientation": "h", "name": phase, "x": means, "y": [*range(len(bars))], "width": 0.62,
        "marker": {"color": f"@{phase}"}, "customdata": shares,
        "text": [each if show else "" for each, show in zip(shares, wide, strict=True)],
        "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
        "insidetextfont": {"color": "@inside"},
        "hovertemplate": f"{phase}: %{{x:.4g}} ms, %{{customdata}}<extra></extra>",
    }  # fmt: skip


def trends(runs: Sequence[Named]) -> list[Chart]:
    """How the phases changed, a chart a run with the same axis; of several runs first the whole iterations."""
    with_trend = [run for run in runs if run.costs.trend]
    if not with_trend:
        return []
    walls = [_ms(point.phases.wall, point.phases) for run in with_trend for point in run.costs.trend]
    top = _top(walls)
    charts = [_wall_chart(with_trend, walls, top)] if len(with_trend) > 1 else []
    for run in with_trend:
        title = "The phases over the iterations" if len(runs) == 1 else run.name
        data = [_phase_area(phase, run.costs) for phase in PHASES]
        own = [_ms(point.phases.wall, point.phases) for point in run.costs.trend]
        charts.append(Chart(title, data, _over_iterations(walls, top), 320, note=_beyond(own, top)))
    return charts


def _wall_chart(runs: Sequence[Named], walls: Sequence[float], top: float) -> Chart:
    data: list[Trace] = []
    for run in runs:
        steps, means = _stairs(run.costs, "wall")
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": text(run.name), "x": steps, "y": means,
                "line": {"shape": "hv", "color": run.colour, "width": 1.8}, "hovertemplate": "%{y:.4g} ms",
            }
        )  # fmt: skip
    layout = _over_iterations(walls, top)
    return Chart("An iteration, over each run", data, layout, 320, note=_beyond(walls, top))


def _phase_area(phase: str, costs: RunCosts) -> Trace:
    steps, means = _stairs(costs, phase)
    return {
        "type": "scatter", "mode": "lines", "stackgroup": "phases", "name": phase, "x": steps, "y": means,
        "line": {"shape": "hv", "width": 0.5, "color": f"@{phase}"}, "fillcolor": f"@{phase}",
        "hovertemplate": "%{y:.4g} ms",
    }  # fmt: skip


def _stairs(costs: RunCosts, phase: str) -> tuple[list[int], list[float]]:
    """Where each point begins and its mean; the end of the last one closes it."""
    points = [point for point in costs.trend if point.phases.iterations]
    means = [rounded(_ms(getattr(point.phases, phase), point.phases)) for point in points]
    end = points[-1].first_iter + points[-1].phases.iterations
    return [*(point.first_iter for point in points), end], [*means, means[-1]]


def _over_iterations(walls: Sequence[float], top: float) -> dict[str, Any]:
    return {
        "hovermode": "x unified",
        "showlegend": True,
        "xaxis": {"title": {"text": "iteration"}, "tickformat": "~s", "hoverformat": ",d"},
        "yaxis": {
            "title": {"text": "ms an iteration"},
            "range": [0, top * 1.06 if top else max(walls) * 1.05],
        },
        "legend": {"traceorder": "normal"},
    }


def _top(values: Sequence[float]) -> float:
    """Where an axis ends that shows what is usual: the greatest value, unless it is far beyond the median."""
    usual = CLIP * median(values)
    return (
        max((value for value in values if value <= usual), default=max(values))
        if max(values) > usual
        else max(values)
    )


def _beyond(values: Sequence[float], top: float) -> str:
    count = sum(value > top for value in values)
    if not count:
        return ""
    points = "1 point is" if count == 1 else f"{count} points are"
    return f"{points} beyond the axis, up to {three_digits(max(values))} ms; “Autoscale” above the chart shows all."


class Bar(NamedTuple):
    """One handler in one run."""

    microseconds: float
    hover: str
    bad: bool


MOST_HANDLERS = 20


def handlers(runs: Sequence[Named]) -> Chart | None:
    """The dearest handlers, the dearest on top; a bar a run."""
    found = [handler_bars(run.costs) for run in runs]
    keys = list(dict.fromkeys(key for bars in found for key in bars))
    most = {key: max(bars[key].microseconds for bars in found if key in bars) for key in keys}
    keys = sorted(keys, key=lambda key: -most[key])[:MOST_HANDLERS]
    if not keys:
        return None
    longest = [most[key] for key in keys]
    limit = _limit(longest)
    width = 0.76 / len(runs)
    data, notes = [], []
    for i, (run, bars) in enumerate(zip(runs, found, strict=True)):
        offset = -0.38 + i * width
        data += _handler_traces(run, keys, bars, offset, width, alone=len(runs) == 1)
        notes += _cut_labels(keys, bars, limit, offset + width / 2, 12 if len(runs) == 1 else 10)
    layout = {
        "barmode": "overlay",
        "hovermode": "closest",
        "showlegend": len(runs) > 1 or any(bar.bad for bars in found for bar in bars.values()),
        "xaxis": {"title": {"text": "µs an iteration"}, "range": [0, limit]},
        "yaxis": {**names_axis([text(key, 52) for key in keys]), "showgrid": False},
        "annotations": notes,
    }
    note = (
        "" if len(most) == len(keys) else f"The {MOST_HANDLERS} dearest of {len(most)}; the table has all. "
    )
    if any(longest_one > limit for longest_one in longest):
        note += "A bar with ▸ is cut off; its number is not. "
    if len(runs) > 1 and any(bar.bad for bars in found for bar in bars.values()):
        note += "A red edge: over its budget."
    return Chart(
        "What each handler adds to an iteration",
        data,
        layout,
        130 + max(ROW, 16 * len(runs)) * len(keys),
        note=note,
    )


def _limit(longest: Sequence[float]) -> float:
    """The end of the axis: room for the longest bar and its number, but for two at most that are far longer than the
    one that follows. `longest` begins with the longest one."""
    cut = 0
    while cut < min(2, len(longest) - 1) and longest[cut] > CLIP * longest[cut + 1] > 0:
        cut += 1
    return longest[cut] * 1.18 or 1.0


def handler_bars(costs: RunCosts) -> dict[str, Bar]:
    """By what a handler is called in two runs, see `report_tables.handler_key`."""
    iterations = max(1, costs.phases.iterations)
    bars = {}
    for key, handler in by_key(costs.handlers).items():
        times = handler.times
        bars[key] = Bar(
            rounded(handler.seconds / iterations * 1e6),
            f"{text(key, 90)}<br>{handler.calls:,} calls, {handler.share * 100:.2f} % of an iteration<br>a call: "
            f"p50 {duration(times.p50)}, p99 {duration(times.p99)}, max {duration(times.max)}"
            + ("" if handler.budget is None else f"<br>its budget for p99: {duration(handler.budget)}"),
            over_budget(handler),
        )
    return bars


def _handler_traces(
    run: Named, keys: Sequence[str], bars: dict[str, Bar], offset: float, width: float, *, alone: bool
) -> list[Trace]:
    """Of a run alone those within their budgets, and those over them in red; beside others, in the colour of the run
    with a red edge."""
    rows = [(i, bars[key]) for i, key in enumerate(keys) if key in bars]
    if not alone:
        return [_handler_trace(text(run.name), run.colour, rows, offset, width, alone=False)]
    return [
        _handler_trace(name, colour, chosen, offset, width, alone=True)
        for name, colour, bad in (("a handler", "@busy", False), ("over its budget", "@bad", True))
        if (chosen := [(i, bar) for i, bar in rows if bar.bad is bad])
    ]


def _handler_trace(
    name: str, colour: str, rows: Sequence[tuple[int, Bar]], offset: float, width: float, *, alone: bool
) -> Trace:
    edges = [0 if alone or not bar.bad else 2 for _, bar in rows]
    return {
        "type": "bar", "orientation": "h", "name": name, "base": 0, "offset": offset, "width": width * 0.88,
        "x": [bar.microseconds for _, bar in rows], "y": [i for i, _ in rows],
        "marker": {"color": colour, "line": {"color": "@bad", "width": edges}},
        "text": [three_digits(bar.microseconds) for _, bar in rows], "textposition": "outside",
        "textfont": {"size": 12 if alone else 10}, "hovertext": [bar.hover for _, bar in rows],
        "hovertemplate": "%{x:,.4g} µs an iteration<br>%{hovertext}<extra></extra>",
    }  # fmt: skip


def _cut_labels(
    keys: Sequence[str], bars: dict[str, Bar], limit: float, middle: float, size: int
) -> list[dict[str, Any]]:
    """What stands in a bar that is longer than the axis."""
    return [
        {
            "x": limit, "y": i + middle, "xanchor": "right", "showarrow": False,
            "font": {"color": "@inside", "size": size}, "text": f"{three_digits(bars[key].microseconds)} ▸",
        }
        for i, key in enumerate(keys)
        if key in bars and bars[key].microseconds > limit
    ]  # fmt: skip


def names_axis(names: Sequence[str]) -> dict[str, Any]:
    """An axis of names from top to bottom; two may read alike."""
    return {
        "tickvals": [*range(len(names))],
        "ticktext": list(names),
        "range": [len(names) - 0.5, -0.5],
        "fixedrange": True,
    }


def _ms(seconds: float, phases: Phases) -> float:
    return rounded(seconds / phases.iterations * 1e3) if phases.iterations else 0.0


def rounded(number: float) -> float:
    """As many digits as a screen shows: half the bytes."""
    return float(f"{number:.6g}")
