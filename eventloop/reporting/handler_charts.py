"""The chart of the synchronous handlers; see `report_charts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from eventloop.costs.records import HandlerCost, RunCosts
from eventloop.reporting.cells import some_of
from eventloop.reporting.charts import CLIP, ROW, Chart, Named, Trace, names_axis, narrow, rounded, text
from eventloop.reporting.handlers import by_key, marked
from eventloop.util.formatting import duration, three_digits


class Bar(NamedTuple):
    """One handler in one run."""

    microseconds: float
    hover: str
    bad: bool


MOST_HANDLERS = 20


def handlers(runs: Sequence[Named]) -> Chart | None:
    """The dearest handlers of an iteration, the dearest on top; a bar a run. Those that run other phases are beyond
    compare, and only named."""
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
    return Chart(title, data, layout, height, note=note, narrow=[narrow(key) for key in keys])


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


def _not_drawn(runs: Sequence[Named]) -> str:
    """Those that run other phases."""
    names = [
        marked(key, handler)
        for run in runs
        if run.costs.phases.iterations
        for key, handler in by_key(run.costs.handlers).items()
        if handler.in_iteration and handler.includes
    ]
    return f"Not drawn: {', '.join(dict.fromkeys(names))}." if names else ""


def _limit(longest: Sequence[float]) -> float:
    """The end of the axis: room for the longest bar and its number, but for two at most that are far longer than the
    one that follows. `longest` begins with the longest one."""
    cut = 0
    while cut < min(2, len(longest) - 1) and longest[cut] > CLIP * longest[cut + 1] > 0:
        cut += 1
    return longest[cut] * 1.18 or 1.0


def handler_bars(costs: RunCosts) -> dict[str, Bar]:
    """Those that are drawn, by what a handler is called in two runs, see `by_key`; none where no iteration was."""
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
        f"{some_of(handler.calls, times.samples)} calls, {handler.share * 100:.2f} % of an iteration<br>a call: "
        f"p50 {duration(times.p50)}, p99 {duration(times.p99)}, max {duration(times.max)}"
        + ("" if handler.budget is None else f"<br>its budget for p99: {duration(handler.budget)}")
    )


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
