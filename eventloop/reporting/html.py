"""Draw reports as one HTML page with charts.

The page contains plotly.js and loads nothing from the network.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from eventloop._version import __version__
from eventloop.reporting.comparison import comparison_tables
from eventloop.reporting.facts import facts, labels
from eventloop.reporting.report import Report
from eventloop.reporting.tables import Table, run_tables
from eventloop.util.formatting import on_a_line

if TYPE_CHECKING:  # charts import plotly, which only a page needs
    from eventloop.reporting.charts import Chart, NamedRun

MARK = b"<!DOCTYPE html>"
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data: blob:"
)
"""What the browser may load: nothing."""
CONFIG = {"displaylogo": False, "responsive": True, "showSendToCloud": False, "plotlyServerURL": ""}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2430; max-width: 1320px; }
body { margin: 24px auto; padding: 0 16px; }
figure { margin: 0; min-width: 0; }
h1, h2, h3, p, dd { overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; }
dt, .remark, footer { color: #5d6777; }
dd, .remark { margin: 0; }
pre { overflow-x: auto; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px 5px 0; text-align: left; white-space: nowrap; border-bottom: 1px solid #e2e5ea; }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 12em; }
.number { text-align: right; }
.bad { color: #c62f2f; }
.advice { margin: 0 0 4px; font-weight: 600; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 470px), 1fr)); gap: 16px; }
"""


def check_plotly() -> None:
    """Raise an error unless plotly, which draws the charts, is installed.

    Raises:
        ImportError: plotly is not installed.
    """
    if importlib.util.find_spec("plotly") is None:
        raise ImportError(
            "a page with charts needs plotly, which the extras demo and report bring: "
            "pip install 'torch-eventloop[report]'"
        )


def is_page(path: Path) -> bool:
    """Return whether a file begins like the pages written here, in upper or lower case."""
    with path.open("rb") as file:
        return file.read(len(MARK)).lower() == MARK.lower()


def as_page(reports: Sequence[Report]) -> str:
    """Return the whole page as text, about 5 MB, most of it plotly.js.

    Everything that comes from the runs is escaped, and the page's content security policy forbids it to load
    anything.

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
        *map(_head, runs),
        "<noscript><p>The charts need JavaScript; the tables say the same.</p></noscript>",
        *_sections(runs),
        *map(_about, runs),
        f"<footer>{made}</footer></body></html>",
    ]
    return "\n".join(part for part in parts if part)


def _head(run: NamedRun) -> str:
    """Return the name, the advice, the facts and the notes of a run as HTML."""
    report = run.report
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd{' class=bad' if bad else ''}>{escape(on_a_line(value))}</dd>"
        for name, value, bad in facts(report)
    )
    path = f"<p class=remark>{escape(report.run)}</p>" if report.run != run.name else ""
    advice = "".join(f"<p class=advice>{escape(on_a_line(line))}</p>" for line in report.advice)
    title = f'<h1 style="color:{run.colour}">{escape(run.name)}</h1>{path}'
    return f"{title}{advice}<dl>{rows}</dl>{_remarks(report.notes)}"


def _sections(runs: Sequence[NamedRun]) -> list[str]:
    """Return the sections of the page: the charts of a subject, then its tables."""
    from eventloop.reporting.charts import handler_charts, phase_charts, scalar_charts, subscriber_charts

    timed = [run for run in runs if run.report.costs is not None]
    iterated = [run for run in timed if run.costs.phases.iterations]
    charts = {
        "Step time": phase_charts(iterated),
        "Handlers": handler_charts(iterated),
        "Background subscribers": subscriber_charts(timed),
        "Scalars": scalar_charts(runs),
    }
    reports = [run.report for run in runs]
    tables = (
        run_tables(reports[0]) if len(runs) == 1 else comparison_tables(reports, [run.name for run in runs])
    )
    found = []
    for title, own in charts.items():
        below = [_table(table, title) for table in tables if table.title.startswith(title)]
        if own or below:
            grid = " class=grid" if title == "Scalars" else ""
            found.append(f"<h2>{title}</h2><div{grid}>{''.join(map(_chart, own))}</div>{''.join(below)}")
    return found


def _chart(chart: Chart) -> str:
    title = escape(chart.title)
    drawn = chart.figure.to_html(full_html=False, include_plotlyjs=False, config=CONFIG)
    return f'<figure aria-label="{title}"><h3>{title}</h3>{drawn}{_remarks([chart.note])}</figure>'


def _table(table: Table, section: str) -> str:
    """Return a table with the lines of its note below it."""
    title = f"<h3>{escape(table.title)}</h3>" if table.title != section else ""
    head = "".join(_cell("th", name, column < table.left) for column, name in enumerate(table.header))
    rows = "".join(
        f"<tr{' class=bad' if number in table.bad else ''}>"
        + "".join(_cell("td", cell, column < table.left) for column, cell in enumerate(row))
        + "</tr>"
        for number, row in enumerate(table.rows)
    )
    notes = [f"Red: {table.why}." if table.bad and table.why else "", *table.note.splitlines()]
    return (
        f"{title}<div class=table><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"{_remarks(notes)}"
    )


def _cell(tag: str, value: str, is_text: bool) -> str:
    return f"<{tag}{'' if is_text else ' class=number'}>{escape(on_a_line(value))}</{tag}>"


def _remarks(lines: Sequence[str]) -> str:
    return "".join(f"<p class=remark>{escape(line)}</p>" for line in lines if line)


def _about(run: NamedRun) -> str:
    """Return the facts of `run_info`, folded."""
    info = run.report.log.info if run.report.log is not None else {}
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd><pre>{escape(value)}</pre></dd>" for name, value in info.items()
    )
    return f"<details><summary>About {escape(run.name)}</summary><dl>{rows}</dl></details>" if rows else ""
