"""Draw reports as one HTML page with charts.

The page contains the part of plotly.js that it needs, and loads nothing from the network.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from eventloop._version import __version__
from eventloop.costs.records import SubscriberCost
from eventloop.reporting.begun import OPTIONS
from eventloop.reporting.comparison import compare
from eventloop.reporting.facts import labels, missed
from eventloop.reporting.page.elements import folded, remarks, table_html
from eventloop.reporting.page.head import about, head, heads
from eventloop.reporting.page.plotly_js import with_traces
from eventloop.reporting.report import Report
from eventloop.reporting.run_tables import (
    COMMANDS,
    INSIDE,
    OUTSIDE,
    RANKS,
    WAITS_TITLE,
    fold,
    handlers_table,
    run_tables,
)
from eventloop.util.formatting import on_a_line, share

if TYPE_CHECKING:  # charts import plotly, which only a page needs
    from eventloop.reporting.page.charts import Chart, NamedRun

BACKGROUND = (
    "Busy: the part of the run in which it delivered. Backlog: the longest queue, in events, and its limit. "
    "Not delivered: dropped, failed, or left at the end."
)
MARK = b"<!DOCTYPE html>"
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data: blob:"
)
"""The content security policy of the page, which forbids the browser to load anything."""
UNUSED = ["select2d", "lasso2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toggleSpikelines"]
CONFIG = {"displaylogo": False, "responsive": True, "showSendToCloud": False, "plotlyServerURL": ""}
CONFIG |= {"modeBarButtonsToRemove": UNUSED}
ON_ERROR = 'addEventListener("error",function(){document.documentElement.className="undrawn"})'
"""The script that shows the second text of `NO_CHARTS` if a chart fails, as in a browser that is too old."""
NO_CHARTS = (
    "<noscript><p>The charts need JavaScript; the tables say the same.</p></noscript>"
    '<p class="undrawn advice">This browser could not draw every chart; the tables say the same.</p>'
)


def check_plotly() -> None:
    """Check that plotly, which draws the charts, is installed.

    Raises:
        ImportError: it is not installed.
    """
    if importlib.util.find_spec("plotly") is None:
        raise ImportError(
            "a page with charts needs plotly, which the extras demo and report bring: "
            "pip install 'torch-eventloop[report]'"
        )


def is_page(path: Path) -> bool:
    """Return whether a file begins with `MARK`, as the pages of this module do, in upper or lower case."""
    with path.open("rb") as file:
        return file.read(len(MARK)).lower() == MARK.lower()


def as_page(reports: Sequence[Report]) -> str:
    """Return the page on one or several runs as text; it usually has 1.3 MB, most of them plotly.js.

    All texts from the runs are escaped, and the page's content security policy forbids it to load anything.

    Raises:
        ImportError: plotly is not installed.
    """
    check_plotly()
    from plotly.offline import get_plotlyjs

    from eventloop.reporting.page.charts import name_runs

    runs = name_runs(labels(reports), reports)
    title = f"{on_a_line(', '.join(run.name for run in runs), 80)} · eventloop report"
    made = f"eventloop {__version__}, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    parts = [
        f'{MARK.decode()}<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title><style>{_style()}</style>",
        f"<script>{ON_ERROR}</script><script>{with_traces(get_plotlyjs())}</script></head><body>",
        head(runs[0]) if len(runs) == 1 else heads(runs),
        NO_CHARTS,
        *_sections(runs),
        *map(about, runs),
        f"<footer>{made}</footer></body></html>",
    ]
    return "\n".join(part for part in parts if part)


def _style() -> str:
    """Return the style sheet, whose colours follow the browser's colour scheme and override plotly's."""
    return (files(__package__) / "page.css").read_text("utf-8")


def _sections(runs: Sequence[NamedRun]) -> list[str]:
    """Return the sections of the page as HTML, each with its charts followed by its tables."""
    from eventloop.reporting.page.charts import handler_charts, phase_charts, scalar_charts

    with_costs = [run for run in runs if run.report.costs is not None]
    with_iterations = [run for run in with_costs if run.costs.phases.iterations]
    charts = {
        "Scalars": f"<div class=grid>{''.join(map(_chart, scalar_charts(runs)))}</div>",
        "Step time": "".join(map(_chart, phase_charts(with_iterations))),
        "Handlers": "".join(map(_chart, handler_charts(with_iterations))),
        "Background subscribers": _background(with_costs),
        WAITS_TITLE: "",
        COMMANDS: "",
        OPTIONS: "",
    }
    titled_tables = _run_tables(runs[0].report) if len(runs) == 1 else _comparisons(runs)
    sections = []
    for title, figures in charts.items():
        tables = "".join(html for name, html in titled_tables if name.startswith(title))
        if tables or "<figure" in figures:
            sections.append(f"<h2>{title}</h2>{figures}{tables}")
    return sections


def _run_tables(report: Report) -> list[tuple[str, str]]:
    """Return (title, HTML) for each table of one run.

    Most tables are hidden until a click; of handlers, the expensive ones are shown above the hidden table.
    """
    titled = []
    for table in run_tables(report):
        heading = f"<h3>{table.title}</h3>" if table.title in (OUTSIDE, RANKS) else ""
        if table.title in (INSIDE, OUTSIDE) and report.costs is not None:
            inside = table.title == INSIDE
            few = handlers_table(report.costs, fold(report.costs, inside=inside).shown, inside=inside)
            titled.append((table.title, heading + (table_html(few.reordered()) if few.rows else "")))
        if table.title in (RANKS, WAITS_TITLE, COMMANDS):
            html = heading + table_html(table)
        else:
            html = folded(f"All {len(table.rows)} rows as a table", table)
        titled.append((table.title, html))
    return titled


def _comparisons(runs: Sequence[NamedRun]) -> list[tuple[str, str]]:
    """Return (title, HTML) for each comparison of several runs.

    Rows that differ by less than 1 % of a run are in a table that is hidden until a click.
    """
    titled, names = [], [run.name for run in runs]
    for comparison in compare([run.report for run in runs]):
        rows = [row for row in comparison.rows if comparison.ratios and row.matters]
        shown = comparison._replace(rows=rows)
        others = comparison._replace(rows=[row for row in comparison.rows if row not in rows])
        html = f"<h3>{comparison.title}</h3>{table_html(shown.table(names))}" if rows else ""
        if others.rows:
            title = "As a table"
            if comparison.ratios:
                title = f"{len(others.rows)} more, which differ by less than 1 % of a run"
            html += folded(title, others.table(names))
        titled.append((comparison.title, html))
    return titled


def _background(runs: Sequence[NamedRun]) -> str:
    """Return bars for each background subscriber as HTML: its busy time, its backlog and its lost events.

    The bar of the backlog shows its share of the queue's capacity. It is missing if the record is of an older
    version, without the capacity.
    """
    rows = [(run, subscriber) for run in runs for subscriber in run.costs.subscribers]
    if not rows:
        return ""
    bars = []
    for run, subscriber in sorted(rows, key=lambda row: row[1].name):
        run_seconds, lost = run.costs.seconds, missed(subscriber, run.costs)
        name = escape(on_a_line(subscriber.name))
        if len(runs) > 1:
            name += f" <small>{escape(run.name)}</small>"
        busy = subscriber.seconds / run_seconds if run_seconds > 0 else 0.0
        total = subscriber.delivered + lost
        bars += [
            f"<strong>{name}</strong>",
            _bar("busy", share(subscriber.seconds, run_seconds), busy, run.colour),
            _bar("backlog", *_backlog(subscriber), run.colour),
            _bar("not delivered", f"{lost:,}", lost / (total or 1), "", bad=bool(lost)),
        ]
    return (
        f'<figure aria-label="Busy, backlog and drops"><h3>Busy, backlog and drops</h3>'
        f"<div class=bars>{''.join(bars)}</div>{remarks([BACKGROUND])}</figure>"
    )


def _backlog(subscriber: SubscriberCost) -> tuple[str, float]:
    """Return the largest number of queued events as text, and its share of the queue's capacity."""
    peak, capacity = subscriber.peak_queued, subscriber.capacity
    return (f"{peak:,} of {capacity:,}", peak / capacity) if capacity else (f"{peak:,}", 0.0)


def _bar(name: str, value: str, filled: float, colour: str, *, bad: bool = False) -> str:
    """Return a bar as HTML, with a name and a value above it; `filled` is the part that is coloured, 0..1."""
    width = 100 * min(1.0, max(0.0, filled))
    style = f"width:{width:.1f}%" + (f";background:{colour}" if colour else "")
    fill = f"<div class='fill{' bad' if bad else ''}' style='{style}'></div>" if width else ""
    return (
        f"<div><small>{name}</small> <span{' class=bad' if bad else ''}>{value}</span>"
        f"<div class=track>{fill}</div></div>"
    )


def _chart(chart: Chart) -> str:
    title = escape(chart.title)
    drawn = chart.figure.to_html(full_html=False, include_plotlyjs=False, config=CONFIG)
    return f'<figure aria-label="{title}"><h3>{title}</h3>{drawn}{remarks([chart.note])}</figure>'
