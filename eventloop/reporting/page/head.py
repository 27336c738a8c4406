"""Make the top of the page: advice, facts and notes on the runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from eventloop.reporting.begun import begun_facts
from eventloop.reporting.comparison import runs_table
from eventloop.reporting.facts import facts
from eventloop.reporting.page.elements import facts_html, remarks, table_html
from eventloop.util.formatting import on_a_line

if TYPE_CHECKING:  # charts import plotly, which only a page needs
    from eventloop.reporting.page.charts import NamedRun


def head(run: NamedRun) -> str:
    """Return the top of a page on one run as HTML: name, advice, facts and notes."""
    report = run.report
    all_facts = f"<div class=facts>{facts_html(facts(report))}{facts_html(begun_facts(report))}</div>"
    path = f"<p class=remark>{escape(report.run)}</p>" if report.run != run.name else ""
    advice = "".join(f"<p class=advice>{escape(on_a_line(line))}</p>" for line in report.advice)
    notes = remarks([*report.missing, *report.notes])
    return f"<h1>{escape(run.name)}</h1>{path}{advice}{all_facts}{notes}"


def heads(runs: Sequence[NamedRun]) -> str:
    """Return the top of a page on several runs as HTML: a table of the runs, advice and notes."""
    table = runs_table([run.report for run in runs], [run.name for run in runs])
    styles = [f"box-shadow:inset 5px 0 {run.colour};padding-left:12px" for run in runs]
    advice = "".join(
        f"<p class=advice><strong>{escape(run.name)}</strong>: {escape(on_a_line(line))}</p>"
        for run in runs
        for line in run.report.advice
    )
    notes = [f"{run.name}: {note}" for run in runs for note in [*run.report.missing, *run.report.notes]]
    return f"<h1>{len(runs)} runs</h1>{table_html(table, styles)}{advice}{remarks(notes)}"


def about(run: NamedRun) -> str:
    """Return a section, hidden until a click, with a run's `run_info` facts and its last logged texts."""
    log = run.report.log
    if log is None:
        return ""
    texts = [(f"{line.name} at {line.step:,}", line.text) for line in log.texts]
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd><pre>{escape(value)}</pre></dd>"
        for name, value in [*log.info.items(), *texts]
    )
    return f"<details><summary>About {escape(run.name)}</summary><dl>{rows}</dl></details>" if rows else ""
