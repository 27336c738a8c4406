"""Make HTML elements from a report's tables and facts, with all texts escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from eventloop.reporting.facts import Fact
from eventloop.reporting.tables import Table
from eventloop.util.formatting import on_a_line

BREAKS = re.compile(r"(?<=\w)([._])(?=\w)")
"""Matches the places at which a long name may be broken across lines."""


def table_html(table: Table, styles: Sequence[str] = ()) -> str:
    """Return a table, in a box that scrolls horizontally, with the lines of its note below it.

    Args:
        styles: the CSS style of the first cell of each row; () for none.
    """
    header = "".join(_cell("th", name, column < table.left) for column, name in enumerate(table.header))
    rows = []
    for number, row in enumerate(table.rows):
        cells = []
        for column, cell in enumerate(row):
            mark, below = table.marks.get((number, column)), table.below.get((number, column))
            cells.append(_cell("td", cell, column < table.left, mark, below))
        if styles:
            cells[0] = f'<td style="{styles[number]}">{escape(row[0])}</td>'
        rows.append(f"<tr{' class=bad' if number in table.bad else ''}>{''.join(cells)}</tr>")
    notes = [f"Red: {table.why}." if table.bad and table.why else "", *table.note.splitlines()]
    body = f"<thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f"<div class=table tabindex=0><table>{body}</table></div>{remarks(notes)}"


def _cell(tag: str, value: str, is_text: bool, mark: str | None = None, below: str | None = None) -> str:
    """Return a table's cell as HTML, with its value escaped; `below` is HTML already."""
    text = escape(on_a_line(value))
    if is_text:
        text = BREAKS.sub(r"\1<wbr>", text)
    inner = f"<span class={mark}>{text}</span>" if mark else text
    small = f"<small>{below}</small>" if below else ""
    return f"<{tag}{'' if is_text else ' class=number'}>{inner}{small}</{tag}>"


def facts_html(facts: Sequence[Fact]) -> str:
    """Return facts as a list of names and values; "" without facts."""
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd{' class=bad' if bad else ''}>{escape(on_a_line(value))}</dd>"
        for name, value, bad in facts
    )
    return f"<dl>{rows}</dl>" if rows else ""


def remarks(lines: Sequence[str]) -> str:
    """Return a paragraph for each line that is not empty."""
    return "".join(f"<p class=remark>{escape(line)}</p>" for line in lines if line)


def folded(title: str, table: Table) -> str:
    """Return a table that is hidden until a click on its title."""
    return f"<details><summary>{escape(title)}</summary>{table_html(table)}</details>"
