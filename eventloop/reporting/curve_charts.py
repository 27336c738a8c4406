"""Prepare the charts of background subscribers and of logged scalars as data for plotly.js.

`charts` describes the form of the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from eventloop.costs.records import SubscriberCost, Times
from eventloop.reporting.charts import (
    ROW,
    Chart,
    NamedRun,
    Trace,
    count_axis,
    names_axis,
    narrow_label,
    rounded,
    text,
)
from eventloop.reporting.downsample import Curve
from eventloop.reporting.tables import IN_SECONDS
from eventloop.util.formatting import duration

LEAST = 1e-7
"""Shortest time on a logarithmic axis, in seconds; shorter times are drawn there."""
DECADES = range(-7, 5)
MODES = {"train": ("@run0", "solid"), "val": ("@run1", "dash"), "test": ("@run2", "dot")}
"""A mode's colour if there is one run, and its line style if there are several."""
FEW = 80
"""The largest number of points that are drawn with markers."""


def subscriber_charts(runs: Sequence[NamedRun]) -> list[Chart]:
    """Return a chart for each run: waits, deliveries, queue lengths and lost events of its subscribers."""
    shown = [(run.name, run.costs.subscribers) for run in runs if run.costs.subscribers]
    axes = _subscriber_axes([row for _, rows in shown for row in rows])
    charts = []
    for name, rows in shown:
        title = "Wait from the emit to the delivery, deliveries, and queues"
        title = title if len(runs) == 1 else f"{name}: {title[0].lower()}{title[1:]}"
        names = {**names_axis([text(row.name, 30) for row in rows]), "showgrid": False}
        layout = {"barmode": "overlay", "hovermode": "closest", "showlegend": True, **axes, "yaxis": names}
        height, short = 110 + 2 * ROW * len(rows), [narrow_label(row.name) for row in rows]
        charts.append(Chart(title, _subscriber_traces(rows), layout, height, narrow=short))
    return charts


def _subscriber_traces(rows: Sequence[SubscriberCost]) -> list[Trace]:
    within = [None if row.over_budget else row.busy for row in rows]
    over = [row.busy if row.over_budget else None for row in rows]
    budgets = [row.budget for row in rows]
    times = [
        *_spans("wait from the emit", "@data", -0.17, [row.wait for row in rows]),
        *_spans("delivery", "@busy", 0.17, within, budgets),
        *_spans("delivery over its budget", "@bad", 0.17, over, budgets),
    ]
    counts = [
        _counts("longest queue", "@muted", -0.3, [row.peak_queued for row in rows]),
        _counts("dropped", "@bad", -0.1, [row.dropped for row in rows]),
        _counts("failed", "@failed", 0.1, [row.failed for row in rows]),
        _counts("left in the queue", "@run3", 0.3, [row.queued for row in rows]),
    ]
    return [*times, *filter(None, counts)]


def _spans(
    name: str,
    colour: str,
    shift: float,
    times: Sequence[Times | None],
    budgets: Sequence[float | None] | None = None,
) -> list[Trace]:
    """Return a bar from p50 to p99 with a point at each end, and a mark at the maximum; none for None."""
    known = zip(times, budgets or [None] * len(times), strict=True)
    rows = [
        (i + shift, t, _hover(name, t, b)) for i, (t, b) in enumerate(known) if t is not None and t.samples
    ]
    if not rows:
        return []
    x = [at for _, each, _ in rows for at in (_visible(each.p50), _visible(each.p99), None)]
    y = [at for row, *_ in rows for at in (row, row, None)]
    hover = [each for *_, hint in rows for each in (hint, hint, "")]
    common = {"type": "scatter", "hovertemplate": "%{hovertext}<extra></extra>", "legendgroup": name}
    return [
        {
            **common, "mode": "lines+markers", "name": f"{name}, p50 to p99", "x": x, "y": y,
            "hovertext": hover, "line": {"color": colour, "width": 5},
            "marker": {"color": colour, "size": 10},
        },
        {
            **common, "mode": "markers", "name": "its maximum", "showlegend": False,
            "x": [_visible(each.max) for _, each, _ in rows], "y": [row for row, *_ in rows],
            "hovertext": [hint for *_, hint in rows],
            "marker": {
                "color": colour, "symbol": "line-ns", "size": 11, "line": {"color": colour, "width": 2},
            },
        },
    ]  # fmt: skip


def _counts(name: str, colour: str, offset: float, counts: Sequence[int]) -> Trace | None:
    if not any(counts):
        return None
    return {
        "type": "bar", "orientation": "h", "name": name, "xaxis": "x2", "base": 0, "width": 0.19,
        "offset": offset - 0.095, "x": list(counts), "y": [*range(len(counts))], "marker": {"color": colour},
        "text": [f"{count:,}" if count else "" for count in counts], "textposition": "outside",
        "hovertemplate": f"{name}: %{{x:,}}<extra></extra>",
    }  # fmt: skip


def _subscriber_axes(rows: Sequence[SubscriberCost]) -> dict[str, Any]:
    """Return the axes for all runs: times logarithmic, events linear."""
    most = max((max(row.peak_queued, row.dropped, row.failed, row.queued) for row in rows), default=0)
    times = [
        _visible(t)
        for row in rows
        for each in (row.wait, row.busy)
        if each.samples
        for t in (each.p50, each.max)
    ]
    edges = [math.log10(min(times)) - 0.2, math.log10(max(times)) + 0.2] if times else [-6.0, 0.0]
    return {
        "xaxis": {
            "type": "log", "domain": [0, 0.6], "title": {"text": "time of one event, or of one delivery"},
            "tickvals": [10.0**decade for decade in DECADES],
            "ticktext": [_tick(decade) for decade in DECADES], "range": edges,
        },
        "xaxis2": {"domain": [0.66, 1], **count_axis("events"), "range": [0, most * 1.2 or 1]},
    }  # fmt: skip


def _tick(decade: int) -> str:
    for unit, power in (("s", 0), ("ms", -3), ("µs", -6), ("ns", -9)):
        if decade >= power:
            return f"{10 ** (decade - power):,} {unit}"
    return ""


def _visible(seconds: float) -> float:
    return rounded(max(LEAST, seconds))


def _hover(name: str, times: Times, budget: float | None) -> str:
    return (
        f"{name}<br>p50 {duration(times.p50)}, p99 {duration(times.p99)}, max {duration(times.max)}"
        f"<br>{times.samples:,} samples"
        + ("" if budget is None else f"<br>its budget for p99: {duration(budget)}")
    )


class ChartGroup(NamedTuple):
    """Charts under one heading."""

    name: str
    charts: list[Chart]


def scalar_charts(runs: Sequence[NamedRun]) -> list[ChartGroup]:
    """Return a chart for each scalar with its modes and all runs, in groups.

    Names with the same prefix before a "/" form a group if there are at least two.
    """
    found: dict[str, list[tuple[NamedRun, Curve]]] = {}
    for run in runs:
        for curve in run.report.log.curves if run.report.log is not None else []:
            found.setdefault(curve.name, []).append((run, curve))
    prefixes = [name.partition("/")[0] for name in found if "/" in name]
    groups: dict[str, list[Chart]] = {"": []}
    for name, members in found.items():
        prefix = name.partition("/")[0] if "/" in name else ""
        group = prefix if prefixes.count(prefix) > 1 else ""
        groups.setdefault(group, []).append(_curve_chart(name, members, alone=len(runs) == 1))
    return [ChartGroup(name, charts) for name, charts in groups.items() if charts]


def _curve_chart(name: str, members: Sequence[tuple[NamedRun, Curve]], *, alone: bool) -> Chart:
    traces, shapes, notes = [], [], []
    for run, curve in members:
        colour, dash = MODES.get(curve.mode, ("@run3", "dashdot"))
        traces.append(
            _curve_trace(run, curve, colour if alone else run.colour, "solid" if alone else dash, alone)
        )
        if curve.first_not_finite is not None:
            shape, note = _not_finite(curve, "" if alone else f"{text(run.name, 30)} ")
            shapes.append(shape)
            notes.append(note)
    layout = {
        "hovermode": "x unified",
        "showlegend": len(members) > 1 or not alone,
        "xaxis": count_axis("step"),
        "shapes": shapes,
        "annotations": notes,
    }
    yaxis: dict[str, Any] = {"title": {"text": "s"}} if name in IN_SECONDS else {}
    if (constant := _constant([curve for _, curve in members])) is not None:
        yaxis["range"] = [constant - abs(constant) / 2, constant + abs(constant) / 2]
    if yaxis:
        layout["yaxis"] = yaxis
    return Chart(name, traces, layout, 290, "curve")


def _constant(curves: Sequence[Curve]) -> float | None:
    """Return the value that all curves always have, None if there is none or it is 0.

    Without a range of its own, plotly would show 0.001 on an axis from -1 to 1.
    """
    values = {v for curve in curves for v in (curve.least, curve.greatest) if math.isfinite(v)}
    value = values.pop() if len(values) == 1 else 0.0
    return value if value and math.isfinite(value * 1.5) else None


def _curve_trace(run: NamedRun, curve: Curve, colour: str, dash: str, alone: bool) -> Trace:
    few = len(curve.steps) <= FEW
    trace: Trace = {
        "type": "scatter", "mode": "lines+markers" if few else "lines", "x": curve.steps,
        "y": _numbers(curve.mean),
        "name": text(curve.mode) if alone else f"{text(run.name, 30)} {text(curve.mode)}",
        "line": {"color": colour, "width": 1.8 if few else 1.4, "dash": dash},
        "hovertemplate": "%{y:.5g}",
    }  # fmt: skip
    if few:
        trace["marker"] = {"color": colour, "size": 5}
    if curve.low:  # the page draws a band from it, so that the page has the numbers once
        trace["band"] = {"low": _numbers(curve.low), "high": _numbers(curve.high), "color": f"{colour}/0.22"}
    return trace


def _not_finite(curve: Curve, whose: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a line at the first value that was not finite, and its label."""
    step = curve.first_not_finite
    place = {"xref": "x", "yref": "paper"}
    shape = {
        **place, "type": "line", "x0": step, "x1": step, "y0": 0, "y1": 1,
        "line": {"color": "@bad", "width": 1.5, "dash": "dot"},
    }  # fmt: skip
    note = {
        **place, "x": step, "y": 1, "yanchor": "top", "showarrow": False,
        "font": {"color": "@bad", "size": 11}, "bgcolor": "@paper",
        "text": f"{whose}{text(curve.mode)}: {curve.not_finite:,} NaN or inf",
    }  # fmt: skip
    return shape, note


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [rounded(value) if math.isfinite(value) else None for value in values]
