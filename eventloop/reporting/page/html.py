"""Draw reports as one HTML page with charts.

The page contains what it needs of plotly.js and loads nothing from the network.
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
"""The content security policy of the page: the browser may load nothing."""
UNUSED = ["select2d", "lasso2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toggleSpikelines"]
CONFIG = {"displaylogo": False, "responsive": True, "showSendToCloud": False, "plotlyServerURL": ""}
CONFIG |= {"modeBarButtonsToRemove": UNUSED}
ON_ERROR = 'addEventListener("error",function(){document.documentElement.className="undrawn"})'
"""The script that shows the remark on charts, if one fails, as all do in a browser too old for plotly.js."""
NO_CHARTS = (
    "<noscript><p>The charts need JavaScript; the tables say the same.</p></noscript>"
    '<p class="undrawn advice">This browser could not draw every chart; the tables say the same.</p>'
)


def check_plotly() -> None:
    """Raise ImportError unless plotly, which draws the charts, is installed."""
    if importlib.util.find_spec("plotly") is None:
        raise ImportError(
            "a page with charts needs plotly, which the extras demo and report bring: "
            "pip install 'torch-eventloop[report]'"
        )


def is_page(path: Path) -> bool:
    """Return whether a file begins like the pages of this module, in upper or lower case."""
    with path.open("rb") as file:
        return file.read(len(MARK)).lower() == MARK.lower()


def as_page(reports: Sequence[Report]) -> str:
    """Return the whole page as text, usually 1.3 MB, most of it plotly.js.

    All text from the runs is escaped, and the page's content security policy forbids it to load anything.

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
    """Return the style sheet. Its colours follow the browser's scheme, and override plotly's."""
    return (files(__package__) / "page.css").read_text("utf-8")


def _sections(runs: Sequence[NamedRun]) -> list[str]:
    """Return the sections of the page, each with its charts followed by its tables."""
    from eventloop.reporting.page.charts import handler_charts, phase_charts, scalar_charts

    timed = [run for run in runs if run.report.costs is not None]
    iterated = [run for run in timed if run.costs.phases.iterations]
    charts = {
        "Scalars": f"<div class=grid>{''.join(map(_chart, scalar_charts(runs)))}</div>",
        "Step time": "".join(map(_chart, phase_charts(iterated))),
        "Handlers": "".join(map(_chart, handler_charts(iterated))),
        "Background subscribers": _background(timed),
        WAITS_TITLE: "",
        COMMANDS: "",
        OPTIONS: "",
    }
    below = _run_tables(runs[0].report) if len(runs) == 1 else _comparisons(runs)
    found = []
    for title, own in charts.items():
        tables = "".join(html for name, html in below if name.startswith(title))
        if tables or "<figure" in own:
            found.append(f"<h2>{title}</h2>{own}{tables}")
    return found


def _run_tables(report: Report) -> list[tuple[str, str]]:
    """Return the tables of one run with their titles; less important rows are in a folded table."""
    found = []
    for table in run_tables(report):
        title = f"<h3>{table.title}</h3>" if table.title in (OUTSIDE, RANKS) else ""
        if table.title in (INSIDE, OUTSIDE) and report.costs is not None:
            inside = table.title == INSIDE
            few = handlers_table(report.costs, fold(report.costs, inside=inside).shown, inside=inside)
            found.append((table.title, title + (table_html(few.reordered()) if few.rows else "")))
        whole = table.title in (RANKS, WAITS_TITLE, COMMANDS)
        html = title + table_html(table) if whole else folded(f"All {len(table.rows)} rows as a table", table)
        found.append((table.title, html))
    return found


def _comparisons(runs: Sequence[NamedRun]) -> list[tuple[str, str]]:
    """Return the comparisons of several runs with their titles; rows without a difference are folded."""
    found, names = [], [run.name for run in runs]
    for each in compare([run.report for run in runs]):
        shown = each._replace(rows=[row for row in each.rows if each.ratios and row.matters])
        others = each._replace(rows=[row for row in each.rows if row not in shown.rows])
        html = f"<h3>{each.title}</h3>{table_html(shown.table(names))}" if shown.rows else ""
        count = f"{len(others.rows)} more, which differ by less than 1 % of a run"
        html += folded(count if each.ratios else "As a table", others.table(names)) if others.rows else ""
        found.append((each.title, html))
    return found


def _background(runs: Sequence[NamedRun]) -> str:
    """Return bars for each background subscriber: its busy share of the run, its backlog and its losses.

    The bar of a backlog is its share of the queue's capacity; older records lack that, and have no such bar.
    """
    rows = [(run, subscriber) for run in runs for subscriber in run.costs.subscribers]
    if not rows:
        return ""
    bars = []
    for run, subscriber in sorted(rows, key=lambda row: row[1].name):
        whole, lost = run.costs.seconds, missed(subscriber, run.costs)
        name = escape(on_a_line(subscriber.name)) + (
            f" <small>{escape(run.name)}</small>" if len(runs) > 1 else ""
        )
        part = subscriber.seconds / whole if whole > 0 else 0.0
        total = subscriber.delivered + lost
        bars += [
            f"<strong>{name}</strong>",
            _bar("busy", share(subscriber.seconds, whole), part, run.colour),
            _bar("backlog", *_backlog(subscriber), run.colour),
            _bar("not delivered", f"{lost:,}", lost / (total or 1), "", bad=bool(lost)),
        ]
    return (
        f'<figure aria-label="Busy, backlog and drops"><h3>Busy, backlog and drops</h3>'
        f"<div class=bars>{''.join(bars)}</div>{remarks([BACKGROUND])}</figure>"
    )


def _backlog(subscriber: SubscriberCost) -> tuple[str, float]:
    """Return the longest queue as text, and its share of the capacity."""
    peak, capacity = subscriber.peak_queued, subscriber.capacity
    return (f"{peak:,} of {capacity:,}", peak / capacity) if capacity else (f"{peak:,}", 0.0)


def _bar(what: str, value: str, part: float, colour: str, *, bad: bool = False) -> str:
    width = 100 * min(1.0, max(0.0, part))
    style = f"width:{width:.1f}%" + (f";background:{colour}" if colour else "")
    fill = f"<div class='fill{' bad' if bad else ''}' style='{style}'></div>" if width else ""
    return (
        f"<div><small>{what}</small> <span{' class=bad' if bad else ''}>{value}</span>"
        f"<div class=track>{fill}</div></div>"
    )


def _chart(chart: Chart) -> str:
    title = escape(chart.title)
    drawn = chart.figure.to_html(full_html=False, include_plotlyjs=False, config=CONFIG)
    return f'<figure aria-label="{title}"><h3>{title}</h3>{drawn}{remarks([chart.note])}</figure>'
