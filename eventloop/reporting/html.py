"""Draw reports as one HTML page with charts.

The page contains plotly.js and loads nothing from the network.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from base64 import b64encode
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from eventloop._version import __version__
from eventloop.reporting.cells import Table
from eventloop.reporting.charts import Chart, NamedRun, name_runs, phase_chart, trend_charts
from eventloop.reporting.curve_charts import scalar_charts, subscriber_charts
from eventloop.reporting.facts import facts, labels
from eventloop.reporting.handler_charts import handler_chart
from eventloop.reporting.handlers import handlers_table, outside_table
from eventloop.reporting.report import Report
from eventloop.reporting.tables import comparison_tables, curves_table, phases_table, subscribers_table
from eventloop.util.formatting import on_a_line

MARK = b"<!DOCTYPE html>"


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

    Everything that comes from the runs is escaped. The page's content security policy allows only its own
    scripts, by their hashes, and no loading.

    Raises:
        ImportError: plotly is not installed.
    """
    check_plotly()
    from plotly.offline import get_plotlyjs

    runs = name_runs(labels(reports), reports)
    page = _Page()
    body = page.sections(runs)
    plotly, script = get_plotlyjs(), _asset("report_page.js")
    title = ", ".join(run.name for run in runs)
    return _filled(
        _asset("report_page.html"),
        {
            "script-hashes": f"{_hash(plotly)} {_hash(script)}",
            "title": escape(f"{on_a_line(title, 80)} · eventloop report"),
            "header": _header(runs),
            "body": body,
            "footer": f"eventloop {__version__}, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
            "charts": _in_script(page.charts),
            "plotly": plotly,
            "script": script,
        },
    )


class _Page:
    """Build sections of HTML and collect the charts that are drawn in them."""

    def __init__(self) -> None:
        self.charts: list[dict[str, Any]] = []

    def sections(self, runs: Sequence[NamedRun]) -> str:
        """Return the content of the page between its head and its foot."""
        timed = [run for run in runs if run.report.costs is not None]
        parts = []
        if timed:
            parts += [self._step_time(timed), self._handlers(timed), self._subscribers(timed)]
        parts += [self._curves(runs), *(_about(run) for run in runs)]
        return "\n".join(part for part in parts if part)

    def _step_time(self, runs: Sequence[NamedRun]) -> str:
        if not any(run.costs.phases.iterations for run in runs):  # only validated, or not begun
            return ""
        parts = [self._card(phase_chart(runs))]
        over_time = trend_charts(runs)
        if len(runs) == 1:
            parts += [self._card(chart) for chart in over_time]
            tables = [_untitled(phases_table(runs[0].costs))]
        else:
            parts += [self._card(over_time[0])] if len(over_time) > 1 else []
            parts.append(self._grid(over_time[1:] if len(over_time) > 1 else over_time))
            tables = _compared(runs, "Step time")
        return _section("Step time", *parts, *map(_table_card, tables))

    def _handlers(self, runs: Sequence[NamedRun]) -> str:
        chart = handler_chart(runs)
        if len(runs) == 1:
            tables = [_untitled(handlers_table(runs[0].costs)), outside_table(runs[0].costs)]
        else:
            tables = _compared(runs, "Handlers")
        parts = [_table_card(table) for table in tables if table.rows]
        if not parts:
            return ""
        return _section("Handlers", *([] if chart is None else [self._card(chart)]), *parts)

    def _subscribers(self, runs: Sequence[NamedRun]) -> str:
        charts = subscriber_charts(runs)
        if not charts:
            return ""
        tables = [
            subscribers_table(run.costs)._replace(title="" if len(runs) == 1 else run.name) for run in runs
        ]
        compared = _compared(runs, "Background") if len(runs) > 1 else []
        parts = [*map(self._card, charts), *map(_table_card, [*tables, *compared])]
        return _section("Background subscribers", *parts)

    def _curves(self, runs: Sequence[NamedRun]) -> str:
        groups = scalar_charts(runs)
        if not groups:
            return ""
        parts = []
        for group in groups:
            heading = f"<h4>{escape(group.name)}</h4>" if group.name else ""
            parts.append(heading + self._grid(group.charts))
        if len(runs) == 1 and runs[0].report.log is not None:
            tables = [_untitled(curves_table(runs[0].report.log.curves))]
        else:
            tables = _compared(runs, "Scalars")
        switch = (
            '<span><label><input type="checkbox" id="smooth" checked> smooth what is noisy</label> '
            '<label><input type="checkbox" id="logarithmic"> logarithmic</label></span>'
        )
        return _section("Scalars", *parts, *map(_table_card, tables), aside=switch)

    def _grid(self, charts: Sequence[Chart]) -> str:
        return f'<div class="grid">{"".join(map(self._card, charts))}</div>'

    def _card(self, chart: Chart) -> str:
        number = len(self.charts)
        self.charts.append(
            {
                "data": chart.data, "layout": chart.layout, "height": chart.height, "kind": chart.kind,
                "narrow": chart.narrow,
            }
        )  # fmt: skip
        title = escape(chart.title)
        remark = f'<p class="remark">{escape(chart.note)}</p>' if chart.note else ""
        return (
            f'<figure class="card"><h3>{title}</h3><div class="chart" role="img" aria-label="{title}" '
            f'data-chart="{number}"></div>{remark}</figure>'
        )


def _header(runs: Sequence[NamedRun]) -> str:
    """Return the facts of each run as HTML."""
    if len(runs) == 1:
        run = runs[0]
        return f"<h1>{escape(run.name)}</h1>{_path(run)}<div class='card run'>{_facts(run)}</div>"
    cards = [
        f'<div class="card run"><h3><span class="dot" style="background:var(--{run.colour[1:]})"></span>'
        f"{escape(run.name)}</h3>{_path(run)}{_facts(run)}</div>"
        for run in runs
    ]
    return f"<h1>{len(runs)} runs side by side</h1>{''.join(cards)}"


def _path(run: NamedRun) -> str:
    return f'<p class="path">{escape(run.report.run)}</p>' if run.report.run != run.name else ""


def _facts(run: NamedRun) -> str:
    pairs = "".join(
        f"<div{' class=bad' if fact.bad else ''}><dt>{escape(fact.name)}</dt>"
        f"<dd>{_value(fact.value)}</dd></div>"
        for fact in facts(run.report)
    )
    remarks = "".join(f'<p class="remark">{escape(note)}</p>' for note in run.report.notes)
    return f'<dl class="facts">{pairs}</dl>' + (f'<div class="remarks">{remarks}</div>' if remarks else "")


def _value(text: str) -> str:
    """Return a fact with its number large and the rest small."""
    number, mark, more = re.split(r"( \(|, of it |$)", on_a_line(text, 90), maxsplit=1)
    rest = f"{mark}{more}".removeprefix(", ").strip()
    return escape(number) + (f"<small>{escape(rest)}</small>" if rest else "")


def _about(run: NamedRun) -> str:
    """Return the facts of `run_info`, folded."""
    info = run.report.log.info if run.report.log is not None else {}
    if not info:
        return ""
    rows = "".join(
        f"<dt>{escape(name)}</dt>"
        f"<dd>{f'<pre>{escape(value)}</pre>' if chr(10) in value else escape(value)}</dd>"
        for name, value in info.items()
    )
    return (
        f"<h2>About {escape(run.name)}</h2><div class='card'><details><summary>facts of the run</summary>"
        f"<dl>{rows}</dl></details></div>"
    )


def _compared(runs: Sequence[NamedRun], begin: str) -> list[Table]:
    tables = comparison_tables([run.report for run in runs], [run.name for run in runs])
    return [table for table in tables if table.title.startswith(begin)]


def _untitled(table: Table) -> Table:
    """Return a table without its title, for use below a heading with the same text."""
    return table._replace(title="")


def _section(title: str, *parts: str, aside: str = "") -> str:
    return f'<section><div class="section-head"><h2>{title}</h2>{aside}</div>{"".join(parts)}</section>'


def _table_card(table: Table) -> str:
    """Return a table with the lines of its note below it."""
    head = "".join(_cell("th", name, column < table.left) for column, name in enumerate(table.header))
    rows = "".join(_row(table, number, row) for number, row in enumerate(table.rows))
    lines = [*([f"Red: {table.why}."] if table.bad and table.why else []), *table.note.splitlines()]
    notes = "".join(f'<p class="remark">{escape(line)}</p>' for line in lines)
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    return (
        f'<div class="card">{title}<div class="scroll"><table style="--name: {_name_width(table)}em">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{notes}</div></div>"
    )


def _name_width(table: Table) -> int:
    """Return the minimum width of the first column in em: that of its longest word, at most 21."""
    words = [word for row in table.rows for word in row[0].split()]
    return min(21, 2 + max(map(len, words), default=0) * 5 // 9)


def _row(table: Table, number: int, row: Sequence[str]) -> str:
    kind = ' class="bad"' if number in table.bad else ' class="all"' if row[0] == "all" else ""
    cells = "".join(_cell("td", cell, column < table.left) for column, cell in enumerate(row))
    return f"<tr{kind}>{cells}</tr>"


def _cell(tag: str, value: str, is_text: bool) -> str:
    return f'<{tag} class="{"text" if is_text else "number"}">{escape(on_a_line(value))}</{tag}>'


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _filled(template: str, values: dict[str, str]) -> str:
    """Replace each `{{name}}` of a template by its value; names within values are not replaced."""
    return re.sub(r"\{\{([\w-]+)\}\}", lambda found: values[found[1]], template)


def _in_script(value: Any) -> str:
    """Encode a value as JSON that can stand in a script: it cannot end the script or begin a comment."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def _hash(script: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
