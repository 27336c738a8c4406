"""Draw reports as one HTML page with charts.

The page contains plotly.js and loads nothing from the network.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from eventloop._version import __version__
from eventloop.reporting.comparison import compare, runs_table
from eventloop.reporting.facts import facts, labels, missed
from eventloop.reporting.report import Report
from eventloop.reporting.run_tables import (
    INSIDE,
    OUTSIDE,
    RANKS,
    WAITS_TITLE,
    fold,
    handlers_table,
    run_tables,
)
from eventloop.reporting.tables import Table
from eventloop.util.formatting import on_a_line, share

if TYPE_CHECKING:  # charts import plotly, which only a page needs
    from eventloop.reporting.charts import Chart, NamedRun

BACKGROUND = (
    "Busy: the part of the run in which it delivered. Backlog: the longest queue, in events. "
    "Not delivered: dropped, failed, or left at the end."
)
BREAKS = re.compile(r"(?<=\w)([._])(?=\w)")
"""Matches the places at which a long name may be broken across lines."""
MARK = b"<!DOCTYPE html>"
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data: blob:"
)
"""The content security policy of the page: the browser may load nothing."""
UNUSED = ["select2d", "lasso2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toggleSpikelines"]
CONFIG = {"displaylogo": False, "responsive": True, "showSendToCloud": False, "plotlyServerURL": ""}
CONFIG |= {"modeBarButtonsToRemove": UNUSED}
STYLE = """
:root { color-scheme: light dark; --text: #1d2430; --soft: #5d6777; --line: #e2e5ea; --page: #ffffff; }
:root { --best: #12703c; --best-ground: #e2f4e9; --worst: #b3261e; --worst-ground: #fdeaea; }
:root { --shade: #f4f6f9; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e8ee; --soft: #9ca7b6; --line: #343c48; --page: #14181e; --shade: #1d232b; }
  :root { --best: #86dfa9; --best-ground: #12351f; --worst: #ff9c92; --worst-ground: #451c1c; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 1320px; }
body { margin: 24px auto; padding: 0 16px; }
figure { margin: 0; min-width: 0; }
h1, h2, h3, p, dd { overflow-wrap: anywhere; }
h1 { font-size: 26px; margin: 0 0 8px; } h2 { margin: 32px 0 8px; }
h3 { font-size: 15px; margin: 16px 0 4px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; }
dt, .remark, footer, small { color: var(--soft); }
dd { margin: 0; } .remark { margin: 6px 0 0; }
pre { overflow-x: auto; }
details { margin: 8px 0; } summary { cursor: pointer; color: var(--soft); }
.table { overflow-x: auto; max-width: 100%; margin: 8px 0; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px 5px 0; text-align: left; border-bottom: 1px solid var(--line); }
th, td { vertical-align: top; white-space: nowrap; } td small { display: block; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--page); z-index: 1; }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 11em; max-width: 38em; }
.number { text-align: right; }
.bad { color: var(--worst); }
.best, .worst { border-radius: 4px; }
.best { color: var(--best); background: var(--best-ground); }
.worst { color: var(--worst); background: var(--worst-ground); }
.best::after { content: " best"; font-size: 10px; } .worst::after { content: " worst"; font-size: 10px; }
.advice { margin: 0 0 8px; padding: 8px 12px; background: var(--shade); border-left: 3px solid #d9730d; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 470px), 1fr)); gap: 16px; }
.bars { display: grid; grid-template-columns: minmax(9em, 1fr) repeat(3, 2fr); gap: 10px 22px; }
.bars > strong { overflow-wrap: anywhere; font-weight: 500; }
.track { height: 8px; border-radius: 4px; background: var(--shade); }
.fill { height: 8px; border-radius: 4px; background: #2f6fde; min-width: 2px; }
.fill.bad { background: #d23b3b; }
@media (max-width: 700px) {
  .bars { grid-template-columns: repeat(3, 1fr); gap: 2px 14px; }
  .bars > strong { grid-column: 1 / -1; margin-top: 10px; }
  th, td { padding-right: 9px; }
}
g[class$=tick] text, [class^=g-x] text, [class^=g-y] text, [class*=title], .infolayer .legendtext,
.annotation-text,
.bartext-outside, .updatemenu-item-text { fill: var(--text) !important; }
.gridlayer path { stroke: var(--line) !important; }
.xlines-above, .ylines-above, .xlines-below, .ylines-below { stroke: var(--soft) !important; }
.updatemenu-item-rect { fill: var(--shade) !important; stroke: var(--line) !important; }
.modebar, .modebar-group { background: none !important; } .modebar-btn path { fill: var(--soft) !important; }
@media (pointer: coarse) { .draglayer * { pointer-events: none !important; } }
"""
"""The style sheet. The colours follow the browser's scheme, and override plotly's.

On touch screens a finger scrolls over charts in place of zooming them.
"""


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
    """Return the whole page as text, about 5 MB, most of it plotly.js.

    All text from the runs is escaped, and the page's content security policy forbids it to load anything.

    Raises:
        ImportError: plotly is not installed.
    """
    check_plotly()
    from plotly.offline import get_plotlyjs

    from eventloop.reporting.charts import name_runs

    runs = name_runs(labels(reports), reports)
    title = f"{on_a_line(', '.join(run.name for run in runs), 80)} · eventloop report"
    made = f"eventloop {__version__}, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    parts = [
        f'{MARK.decode()}<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head><body>",
        _head(runs[0]) if len(runs) == 1 else _heads(runs),
        "<noscript><p>The charts need JavaScript; the tables say the same.</p></noscript>",
        *_sections(runs),
        *map(_about, runs),
        f"<footer>{made}</footer></body></html>",
    ]
    return "\n".join(part for part in parts if part)


def _head(run: NamedRun) -> str:
    """Return the top of a page on one run as HTML: name, advice, facts and notes."""
    report = run.report
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd{' class=bad' if bad else ''}>{escape(on_a_line(value))}</dd>"
        for name, value, bad in facts(report)
    )
    path = f"<p class=remark>{escape(report.run)}</p>" if report.run != run.name else ""
    advice = "".join(f"<p class=advice>{escape(on_a_line(line))}</p>" for line in report.advice)
    notes = _remarks([*report.missing, *report.notes])
    return f"<h1>{escape(run.name)}</h1>{path}{advice}<dl>{rows}</dl>{notes}"


def _heads(runs: Sequence[NamedRun]) -> str:
    """Return the head of a page on several runs: a table with best and worst marked, advice and notes."""
    table = runs_table([run.report for run in runs], [run.name for run in runs])
    styles = [f"box-shadow:inset 5px 0 {run.colour};padding-left:12px" for run in runs]
    advice = "".join(
        f"<p class=advice><strong>{escape(run.name)}</strong>: {escape(on_a_line(line))}</p>"
        for run in runs
        for line in run.report.advice
    )
    notes = [f"{run.name}: {note}" for run in runs for note in [*run.report.missing, *run.report.notes]]
    return f"<h1>{len(runs)} runs</h1>{_table(table, styles)}{advice}{_remarks(notes)}"


def _sections(runs: Sequence[NamedRun]) -> list[str]:
    """Return the sections of the page, each with its charts followed by its tables."""
    from eventloop.reporting.charts import handler_charts, phase_charts, scalar_charts

    timed = [run for run in runs if run.report.costs is not None]
    iterated = [run for run in timed if run.costs.phases.iterations]
    charts = {
        "Step time": "".join(map(_chart, phase_charts(iterated))),
        "Handlers": "".join(map(_chart, handler_charts(iterated))),
        "Background subscribers": _background(timed),
        WAITS_TITLE: "",
        "Scalars": f"<div class=grid>{''.join(map(_chart, scalar_charts(runs)))}</div>",
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
            found.append((table.title, title + (_table(few.reordered()) if few.rows else "")))
        whole = table.title in (RANKS, WAITS_TITLE)
        html = title + _table(table) if whole else _folded(f"All {len(table.rows)} rows as a table", table)
        found.append((table.title, html))
    return found


def _comparisons(runs: Sequence[NamedRun]) -> list[tuple[str, str]]:
    """Return the comparisons of several runs with their titles; rows without a difference are folded."""
    found, names = [], [run.name for run in runs]
    for each in compare([run.report for run in runs]):
        shown = each._replace(rows=[row for row in each.rows if each.ratios and row.matters])
        others = each._replace(rows=[row for row in each.rows if row not in shown.rows])
        html = f"<h3>{each.title}</h3>{_table(shown.table(names))}" if shown.rows else ""
        count = f"{len(others.rows)} more, which differ by less than 1 % of a run"
        html += _folded(count if each.ratios else "As a table", others.table(names)) if others.rows else ""
        found.append((each.title, html))
    return found


def _folded(what: str, table: Table) -> str:
    return f"<details><summary>{escape(what)}</summary>{_table(table)}</details>"


def _background(runs: Sequence[NamedRun]) -> str:
    """Return bars for each background subscriber: its busy share of the run, its backlog and its losses."""
    rows = [(run, subscriber) for run in runs for subscriber in run.costs.subscribers]
    if not rows:
        return ""
    most = max(subscriber.peak_queued for _, subscriber in rows)
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
            _bar("backlog", f"{subscriber.peak_queued:,}", subscriber.peak_queued / (most or 1), run.colour),
            _bar("not delivered", f"{lost:,}", lost / (total or 1), "", bad=bool(lost)),
        ]
    return (
        f'<figure aria-label="Busy, backlog and drops"><h3>Busy, backlog and drops</h3>'
        f"<div class=bars>{''.join(bars)}</div>{_remarks([BACKGROUND])}</figure>"
    )


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
    return f'<figure aria-label="{title}"><h3>{title}</h3>{drawn}{_remarks([chart.note])}</figure>'


def _table(table: Table, styles: Sequence[str] = ()) -> str:
    """Return a table with the lines of its note below it.

    It scrolls horizontally in its own box if it is wider than the screen.

    Args:
        styles: the style of the first cell of each row; () for none.
    """
    header = "".join(_cell("th", name, column < table.left) for column, name in enumerate(table.header))
    rows = []
    for number, row in enumerate(table.rows):
        cells = [
            _cell(
                "td", cell, column < table.left, table.marks.get(at := (number, column)), table.below.get(at)
            )
            for column, cell in enumerate(row)
        ]
        if styles:
            cells[0] = f'<td style="{styles[number]}">{escape(row[0])}</td>'
        rows.append(f"<tr{' class=bad' if number in table.bad else ''}>{''.join(cells)}</tr>")
    notes = [f"Red: {table.why}." if table.bad and table.why else "", *table.note.splitlines()]
    body = f"<thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f"<div class=table tabindex=0><table>{body}</table></div>{_remarks(notes)}"


def _cell(tag: str, value: str, is_text: bool, mark: str | None = None, below: str | None = None) -> str:
    text = escape(on_a_line(value))
    if is_text:
        text = BREAKS.sub(r"\1<wbr>", text)
    inner = f"<span class={mark}>{text}</span>" if mark else text
    small = f"<small>{below}</small>" if below else ""
    return f"<{tag}{'' if is_text else ' class=number'}>{inner}{small}</{tag}>"


def _remarks(lines: Sequence[str]) -> str:
    return "".join(f"<p class=remark>{escape(line)}</p>" for line in lines if line)


def _about(run: NamedRun) -> str:
    """Return the facts of a run's `run_info` events in a folded section."""
    info = run.report.log.info if run.report.log is not None else {}
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd><pre>{escape(value)}</pre></dd>" for name, value in info.items()
    )
    return f"<details><summary>About {escape(run.name)}</summary><dl>{rows}</dl></details>" if rows else ""
