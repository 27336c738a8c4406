"""Draw reports on a terminal: tables, and curves as lines of block characters."""

from __future__ import annotations

from collections.abc import Sequence

from eventloop.costs.trend import trend
from eventloop.reporting.comparison import compare, comparison_tables, runs_table
from eventloop.reporting.facts import facts, labels
from eventloop.reporting.glance import ALERT, run_at_a_glance, runs_at_a_glance
from eventloop.reporting.report import Report
from eventloop.reporting.tables import Table, run_tables
from eventloop.util.formatting import ASCII_BLOCKS, BLOCKS, on_a_line, sparkline, table

WIDE = 32
"""The largest number of characters of a cell, except names; JSON and the page have the whole text."""


def as_text(reports: Sequence[Report], *, encoding: str = "utf-8", width: int | None = None) -> str:
    """Draw the report of one run or of several as text: in at most 25 lines, or with every table in full.

    Args:
        encoding: the encoding of the output; if it lacks block characters, plainer ones are used.
        width: the width of a line in characters; None draws every table in full, as wide as it is.
    """
    blocks = BLOCKS if _has(encoding, BLOCKS) else ASCII_BLOCKS
    names = labels(reports)
    if width is None:
        text = _everything(reports, names, blocks)
    elif len(reports) == 1:
        text = run_at_a_glance(reports[0], names[0], width, blocks)
    else:
        text = runs_at_a_glance(reports, names, width, blocks)
    return text if blocks is BLOCKS else _plain(text, encoding)


def _everything(reports: Sequence[Report], names: Sequence[str], blocks: str) -> str:
    parts = [_head(report, name) for report, name in zip(reports, names, strict=True)]
    if len(reports) == 1:
        parts += [_table(each, blocks) for each in run_tables(reports[0])]
    else:
        runs = runs_table(reports, names)
        parts += [_table(runs, blocks), _trends(reports, names, blocks)]
        parts += [_table(each, blocks) for each in comparison_tables(compare(reports), names)]
    return "\n\n".join(part for part in parts if part)


def _plain(text: str, encoding: str) -> str:
    """Return a text in which the characters that the encoding lacks are replaced."""
    for character, plain in {"µ": "u", "×": "x", "≈": "~", "…": "."}.items():
        text = text.replace(character, plain)
    return text.encode(encoding, "replace").decode(encoding)


def _has(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def _head(report: Report, name: str) -> str:
    """Draw the head of a report: the run's name, advice, facts and notes."""
    where = "" if name == report.run else f"  ({report.run})"
    rows = table_lines([[fact.name, fact.value] for fact in facts(report)])
    lines = [f"Run {name}{where}", *(f"  -> {line}" for line in report.advice)]
    lines += [*(f"  {row}" for row in rows), *(f"  {note}" for note in report.notes)]
    return "\n".join(map(on_a_line, lines))


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Draw pairs of a name and a value, one pair a line."""
    width = max((len(row[0]) for row in rows), default=0)
    return [f"{name.ljust(width)}  {value}" for name, value in rows]


def _table(each: Table, blocks: str) -> str:
    header = [*map(on_a_line, each.header)]
    rows = [
        [on_a_line(cell, WIDE if column else None) for column, cell in enumerate(row)] for row in each.rows
    ]
    if each.lines is not None:
        phases = each.title == "Step time"
        header.append("over the iterations")
        for row, values in zip(rows, each.lines, strict=True):
            row.append(sparkline(values, from_zero=phases, blocks=blocks))
    if each.bad:
        header.insert(0, "")
        for index, row in enumerate(rows):
            row.insert(0, ALERT if index in each.bad else "")
    first = each.left + bool(each.bad)
    right = range(first, first + len(each.header) - each.left)
    marks = [f"{ALERT}  {each.why}"] if each.bad and each.why else []
    notes = map(on_a_line, [*marks, *each.note.splitlines()])
    return "\n".join(filter(None, [each.title, table(header, rows, right=right), *notes]))


def _trends(reports: Sequence[Report], names: Sequence[str], blocks: str) -> str:
    """Draw the mean time of an iteration over the course of each run, a line for each run."""
    rows = [
        [name, sparkline(trend(report.costs, "wall"), from_zero=True, blocks=blocks)]
        for name, report in zip(names, reports, strict=True)
        if report.costs is not None and report.costs.trend
    ]
    return "\n".join(["An iteration, over each run", *table_lines(rows)]) if rows else ""
