"""Prepare the chart of the synchronous handlers as data for plotly.js.

`charts` describes the form of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from eventloop.costs.records import HandlerCost, RunCosts
from eventloop.reporting.cells import calls_text
from eventloop.reporting.charts import (
    CLIP,
    ROW,
    Chart,
    NamedRun,
    Trace,
    names_axis,
    narrow_label,
    rounded,
    text,
)
from eventloop.reporting.handlers import by_key, with_includes
from eventloop.util.formatting import duration, three_digits


class Bar(NamedTuple):
    """One handler of one run."""

    microseconds: float
    hover: str
    bad: bool


MOST_HANDLERS = 20


def handler_chart(runs: Sequence[NamedRun]) -> Chart | None:
    """Return the chart of the most expensive handlers of an iteration, a bar for each run.

    Returns None if there is no bar to draw. Handlers that run other phases are not comparable: a note names
    them.
    """
    found = [handler_bars(run.costs) for run in runs]
    every = list(dict.fromkeys(key for bars in found for key in bars))
    most = {key: max(bars[key].microseconds for bars in found if key in bars) for key in every}
    keys = sorted(every, key=lambda key: -most[key])[:MOST_HANDLERS]
    if not keys:
        return None
    limit = _limit([most[key] for key in keys])
    width = 0.76 / len(runs)
    data, labels = [], []
    for i, (run, bars) in enumerate(zip(runs, found, strict=True)):
        offset = -0.38 + i * width
        data += _handler_traces(run, keys, bars, offset, width, alone=len(runs) == 1)
        labels += _cut_labels(keys, bars, limit, offset + width / 2, 12 if len(runs) == 1 else 10)
    bad = any(bar.bad for bars in found for bar in bars.values())
    notes = [
        f"The {MOST_HANDLERS} dearest of {len(every)}; the table has all." if len(every) > len(keys) else "",
        "A bar with ▸ is cut off; its number is not." if labels else "",
        "A red edge: over its budget." if len(runs) > 1 and bad else "",
        _not_drawn(runs),
    ]
    height = 130 + max(ROW, 16 * len(runs)) * len(keys)
    title, note = "What each handler adds to an iteration", " ".join(filter(None, notes))
    layout = _layout(keys, limit, labels, legend=len(runs) > 1 or bad)
    return Chart(title, data, layout, height, note=note, narrow=[narrow_label(key) for key in keys])


def _layout(
    keys: Sequence[str], limit: float, labels: Sequence[dict[str, Any]], *, legend: bool
) -> dict[str, Any]:
    return {
        "barmode": "overlay",
        "hovermode": "closest",
        "showlegend": legend,
        "xaxis": {"title": {"text": "µs an iteration, mean"}, "range": [0, limit]},
        "yaxis": {**names_axis([text(key, 52) for key in keys]), "showgrid": False},
        "annotations": labels,
    }


def _not_drawn(runs: Sequence[NamedRun]) -> str:
    """Return a note that names the handlers that run other phases."""
    names = [
        with_includes(key, handler)
        for run in runs
        if run.costs.phases.iterations
        for key, handler in by_key(run.costs.handlers).items()
        if handler.in_iteration and handler.includes
    ]
    return f"Not drawn: {', '.join(dict.fromkeys(names))}." if names else ""


def _limit(longest: Sequence[float]) -> float:
    """Return the end of the axis, given the bars' lengths, the longest first.

    It has room for the longest bar and its number, except that up to two bars far longer than the next are
    cut.
    """
    cut = 0
    while cut < min(2, len(longest) - 1) and longest[cut] > CLIP * longest[cut + 1] > 0:
        cut += 1
    return longest[cut] * 1.18 or 1.0


def handler_bars(costs: RunCosts) -> dict[str, Bar]:
    """Return the bars of a run's handlers by their key in `by_key`; none if the run had no iterations."""
    number = costs.phases.iterations
    inside = [handler for handler in costs.handlers if handler.in_iteration and not handler.includes]
    return {
        key: Bar(
            rounded(handler.seconds / number * 1e6),
            f"{text(key, 90)}<br>{_hover(handler)}",
            handler.over_budget,
        )
        for key, handler in (by_key(inside) if number else {}).items()
    }


def _hover(handler: HandlerCost) -> str:
    times = handler.times
    return (
        f"{calls_text(handler.calls, times.samples)} calls, {handler.share * 100:.2f} % of an iteration<br>"
        f"a call: p50 {duration(times.p50)}, p99 {duration(times.p99)}, max {duration(times.max)}"
        + ("" if handler.budget is None else f"<br>its budget for p99: {duration(handler.budget)}")
    )


def _handler_traces(
    run: NamedRun, keys: Sequence[str], bars: dict[str, Bar], offset: float, width: float, *, alone: bool
) -> list[Trace]:
    """Return the bars of a run.

    A run alone has bars over their budget in red; next to others, bars have the run's colour and a red edge.
    """
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
    """Return the numbers that stand in bars longer than the axis."""
    return [
        {
            "x": limit, "y": i + middle, "xanchor": "right", "showarrow": False,
            "font": {"color": "@inside", "size": size}, "text": f"{three_digits(bars[key].microseconds)} ▸",
        }
        for i, key in enumerate(keys)
        if key in bars and bars[key].microseconds > limit
    ]  # fmt: skip
