"""Define a table of a report, and draw tables and paragraphs for a terminal.

`run_tables` and `comparison` make the tables. `text` draws them with this module, `page` draws them as HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap
from typing import Any, NamedTuple

from eventloop.util.formatting import ABSENT, BLOCKS, on_a_line, sparkline, table

ALERT = "!"
"""The sign before a highlighted row."""
GAP = 2
"""The number of spaces between columns."""
NAME = 24
"""Names may take at least this many characters of a line, even if the line is short."""
CURVE, WIDEST = 10, 32
"""The least and the largest width of a curve, in characters.

`in_full` also cuts all cells except names to `WIDEST`; JSON and the page have the whole text.
"""
PLAIN = {"µ": "u", "×": "x", "≈": "~", "…": "."}
"""The replacements of characters that an encoding may lack."""

Column = tuple[str, Callable[[Any], str]]
"""The head of a column, and a function that returns the column's cell for an item."""


class Table(NamedTuple):
    """Hold a table of texts with a title, whose first column has the names of the rows."""

    title: str
    header: list[str]
    rows: list[list[str]]
    left: int = 1
    """How many of the first columns are texts; the others are numbers."""
    bad: frozenset[int] = frozenset()
    """The indices of the rows to highlight."""
    why: str = ""
    """The reason why rows are highlighted."""
    lines: list[list[float]] | None = None
    """The values of a curve for each row, drawn at the end of the row; None without curves."""
    note: str = ""
    """The lines of explanation below the table."""
    first: tuple[str, ...] = ()
    """The names of the most important columns, which a narrow terminal shows before all others."""
    marks: Mapping[tuple[int, int], str] = {}
    """The mark "best" or "worst" of a cell, by its row and column."""
    below: Mapping[tuple[int, int], str] = {}
    """The ratio to the first run that the page shows below a cell, by its row and column."""

    def by_importance(self) -> list[int]:
        """Return the indices of the columns that are not empty, the most important first."""
        named = [self.header.index(name) for name in self.first if name in self.header]
        order = dict.fromkeys([0, *named, *range(len(self.header))])
        return [i for i in order if not i or any(row[i] not in ("", ABSENT) for row in self.rows)]

    def reordered(self) -> Table:
        """Return the table with the most important columns first, without empty columns and the note."""
        order = self.by_importance()
        header, *rows = ([row[i] for i in order] for row in [self.header, *self.rows])
        return self._replace(header=header, rows=rows, left=1, note="")


def cells(items: Sequence[Any], columns: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table that has a row for each item."""
    return [name for name, _ in columns], [[cell(item) for _, cell in columns] for item in items]


def in_full(shown: Table, blocks: str = BLOCKS) -> str:
    """Draw a table with its title, all its columns and its notes.

    Args:
        shown: the table.
        blocks: the characters of curves, from low to high.
    """
    header = [on_a_line(name) for name in shown.header]
    rows = [[on_a_line(cell, WIDEST if i else None) for i, cell in enumerate(row)] for row in shown.rows]
    if shown.lines is not None:
        header.append("over the iterations")
        for row, values in zip(rows, shown.lines, strict=True):
            row.append(sparkline(values, from_zero=shown.title == "Step time", blocks=blocks))
    first_number = shown.left
    notes = shown.note.splitlines()
    if shown.bad:  # a column of signs is put before the others
        header = ["", *header]
        rows = [[ALERT if i in shown.bad else "", *row] for i, row in enumerate(rows)]
        first_number += 1
        if shown.why:
            notes = [f"{ALERT}  {shown.why}", *notes]
    right = range(first_number, first_number - shown.left + len(shown.header))
    return "\n".join(filter(None, [shown.title, table(header, rows, right=right), *map(on_a_line, notes)]))


def fitted(shown: Table, width: int, blocks: str = BLOCKS) -> list[str]:
    """Draw a table without its title and notes as lines of at most `width` characters.

    Long names are cut, and the less important columns are left out if they do not fit. Empty columns are
    left out, too.

    Args:
        shown: the table.
        width: the width of a line in characters.
        blocks: the characters of curves, from low to high.
    """
    lines = [shown.header, *_alerted_rows(shown)]
    lines = [[*map(on_a_line, line)] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    name_width = min(widths[0], max(NAME, width // 3))
    columns, remaining = [0], width - name_width
    for column in shown.by_importance()[1:]:
        if widths[column] + GAP > remaining:
            break
        columns, remaining = sorted([*columns, column]), remaining - widths[column] - GAP
    missing = min(widths[0] - name_width, remaining)  # long names take the remaining characters
    name_width, remaining = name_width + missing, remaining - missing
    header, *rows = ([on_a_line(line[0], name_width), *(line[i] for i in columns[1:])] for line in lines)
    if shown.lines is not None and remaining >= CURVE + GAP:
        header.append("over the run"[: remaining - GAP])
        for row, values in zip(rows, shown.lines, strict=True):
            curve_width = min(WIDEST, remaining - GAP)
            row.append(sparkline(values, width=curve_width, from_zero=True, blocks=blocks))
    right = range(sum(i < shown.left for i in columns), len(columns))
    return table(header, rows, right=right, rule=False).split("\n")


def _alerted_rows(shown: Table) -> list[list[str]]:
    """Return the rows of a table; if some are highlighted, their names begin with `ALERT`."""
    if not shown.bad:
        return shown.rows
    signs = [f"{ALERT} " if number in shown.bad else "  " for number in range(len(shown.rows))]
    return [[sign + row[0], *row[1:]] for sign, row in zip(signs, shown.rows, strict=True)]


def paragraph(begin: str, text: str, width: int, most: int = 2) -> list[str]:
    """Wrap a text into at most `most` lines of at most `width` characters, and cut the rest.

    Args:
        begin: the begin of the first line; the text of later lines is indented by its length.
    """
    return wrap(
        begin + on_a_line(text),
        width,
        subsequent_indent=" " * len(begin),
        max_lines=most,
        placeholder=" …",
        break_on_hyphens=False,
    )


def encodable(text: str, encoding: str) -> bool:
    """Return whether an encoding has all characters of a text."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def plain(text: str, encoding: str) -> str:
    """Replace the characters in `PLAIN` by plain ones, and others that the encoding lacks by "?"."""
    for character, replacement in PLAIN.items():
        text = text.replace(character, replacement)
    return text.encode(encoding, "replace").decode(encoding)
