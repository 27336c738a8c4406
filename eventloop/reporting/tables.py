"""Define a table of a report, and draw it and its paragraphs for a terminal.

`run_tables` and `comparison` make the tables; `text` draws them with this module, and `html` on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap
from typing import Any, NamedTuple

from eventloop.util.formatting import ABSENT, BLOCKS, on_a_line, sparkline, table

ALERT = "!"
"""The mark of a highlighted row."""
GAP = 2
"""The number of spaces between columns."""
NAME = 24
"""The least width of the column of names in characters; with shorter names the column is narrower."""
CURVE, WIDEST = 10, 32
"""The least and the largest width of a curve, in characters.

A table in full cuts all cells but the names to `WIDEST`, too; JSON and the page have the whole text.
"""
PLAIN = {"µ": "u", "×": "x", "≈": "~", "…": "."}
"""The replacements of characters that an encoding may lack."""

Column = tuple[str, Callable[[Any], str]]
"""The head of a column, and the function that returns an item's cell."""


class Table(NamedTuple):
    """A table of texts with a title; the first column has the names of the rows."""

    title: str
    header: list[str]
    rows: list[list[str]]
    left: int = 1
    """Number of text columns, from the left; the other columns are numbers."""
    bad: frozenset[int] = frozenset()
    """The indices of the rows to highlight."""
    why: str = ""
    """The reason for which rows are highlighted."""
    lines: list[list[float]] | None = None
    """A curve for each row, drawn at the end of the row; None without curves."""
    note: str = ""
    """One or more lines of explanation below the table."""
    first: tuple[str, ...] = ()
    """The columns that a narrow terminal shows first, by importance; all other columns follow."""
    marks: Mapping[tuple[int, int], str] = {}
    """The marks "best" and "worst" of cells, by row and column."""
    below: Mapping[tuple[int, int], str] = {}
    """The ratios to the first run that the page shows below values, by row and column."""

    def by_importance(self) -> list[int]:
        """Return the indices of the columns with a text or number, the most important first."""
        named = [self.header.index(name) for name in self.first if name in self.header]
        order = dict.fromkeys([0, *named, *range(len(self.header))])
        return [i for i in order if not i or any(row[i] not in ("", ABSENT) for row in self.rows)]

    def reordered(self) -> Table:
        """Return the table without its note and empty columns, with its most important columns first."""
        order = self.by_importance()
        header, *rows = ([row[i] for i in order] for row in [self.header, *self.rows])
        return self._replace(header=header, rows=rows, left=1, note="")


def cells(items: Sequence[Any], columns: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table, with a row for each item."""
    return [name for name, _ in columns], [[cell(item) for _, cell in columns] for item in items]


def in_full(each: Table, blocks: str = BLOCKS) -> str:
    """Draw all of a table, with its title and notes.

    Args:
        blocks: the characters of curves, from low to high.
    """
    header = [on_a_line(name) for name in each.header]
    rows = [[on_a_line(cell, WIDEST if i else None) for i, cell in enumerate(row)] for row in each.rows]
    if each.lines is not None:
        header.append("over the iterations")
        for row, values in zip(rows, each.lines, strict=True):
            row.append(sparkline(values, from_zero=each.title == "Step time", blocks=blocks))
    marks = [[ALERT if i in each.bad else ""] if each.bad else [] for i in range(len(rows))]
    rows = [mark + row for mark, row in zip(marks, rows, strict=True)]
    begin = [""] if each.bad else []
    right = range(each.left + len(begin), len(each.header) + len(begin))
    why = [f"{ALERT}  {each.why}"] if each.bad and each.why else []
    notes = map(on_a_line, [*why, *each.note.splitlines()])
    return "\n".join(filter(None, [each.title, table(begin + header, rows, right=right), *notes]))


def fitted(each: Table, width: int, blocks: str = BLOCKS) -> list[str]:
    """Draw a table without its title and notes, with the columns that fit and long names shortened.

    Columns whose cells are all empty are left out.

    Args:
        width: the width of a line in characters.
        blocks: the characters of curves, from low to high.
    """
    marks = [f"{ALERT} " if i in each.bad else "  " if each.bad else "" for i in range(len(each.rows))]
    lines = [each.header, *([mark + row[0], *row[1:]] for mark, row in zip(marks, each.rows, strict=True))]
    lines = [[*map(on_a_line, line)] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    name = min(widths[0], max(NAME, width // 3))
    kept, room = [0], width - name
    for column in each.by_importance()[1:]:
        if widths[column] + GAP > room:
            break
        kept, room = sorted([*kept, column]), room - widths[column] - GAP
    name, room = min(widths[0], name + room), room - min(widths[0] - name, room)
    header, *rows = ([on_a_line(line[0], name), *(line[i] for i in kept[1:])] for line in lines)
    if each.lines is not None and room >= CURVE + GAP:
        header.append("over the run"[: room - GAP])
        for row, values in zip(rows, each.lines, strict=True):
            row.append(sparkline(values, width=min(WIDEST, room - GAP), from_zero=True, blocks=blocks))
    right = range(sum(i < each.left for i in kept), len(kept))
    return table(header, rows, right=right, rule=False).split("\n")


def paragraph(begin: str, text: str, width: int, most: int = 2) -> list[str]:
    """Wrap a text into at most `most` lines of at most `width` characters, later lines indented."""
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
    """Return a text with plain characters, and "?" for any others that the encoding lacks."""
    for character, replacement in PLAIN.items():
        text = text.replace(character, replacement)
    return text.encode(encoding, "replace").decode(encoding)
