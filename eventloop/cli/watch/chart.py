"""Draw a curve as lines of text, with a grid of two by four dots in each character."""

from __future__ import annotations

import math
from collections.abc import Sequence

from eventloop.util.formatting import value_text

BRAILLE = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits of the dots in a braille character: by column from the left, and by row from the top."""
STAR = "*"
"""Stands for a character with dots if the output has no braille characters."""
LABEL = 10
"""The width of the labels of the y axis in characters."""


def chart(
    steps: Sequence[int], values: Sequence[float], width: int, height: int, *, braille: bool = True
) -> list[str]:
    """Draw values over steps as `height` lines of at most `width` characters.

    The first line is labelled with the greatest value, the last but one with the least, and the last line has
    the first and the last step. Values that are not finite are left out; without a finite value the result is
    empty.

    Args:
        steps: the steps, in ascending order.
        values: a value for each step.
        width: at least `LABEL` + 4.
        height: at least 3.
        braille: whether to draw with braille characters; else with stars.
    """
    points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if not points:
        return []
    columns, rows = width - LABEL - 1, height - 1
    low, high = min(value for _, value in points), max(value for _, value in points)
    grid = _grid(points, low, high, columns * 2, rows * 4)
    lines = [
        f"{_label(row, rows, low, high):>{LABEL}} {_row(grid, row, columns, braille=braille)}".rstrip()
        for row in range(rows)
    ]
    first, last = f"{points[0][0]:,}", f"{points[-1][0]:,}"
    between = max(1, columns - len(first) - len(last))
    return [*lines, f"{'':>{LABEL}} {first}{'':{between}}{last}"[:width]]


def _label(row: int, rows: int, low: float, high: float) -> str:
    """Return the greatest value for the first row and the least for the last, and "" for the others."""
    if row not in (0, rows - 1):
        return ""
    value = high if row == 0 else low
    text = value_text(value)
    return text if len(text) <= LABEL else f"{value:.2e}"


Grid = set[tuple[int, int]]
"""The dots that are set, each as (column from the left, row from the top)."""


def _grid(points: Sequence[tuple[int, float]], low: float, high: float, columns: int, rows: int) -> Grid:
    """Return the dots of a line through the points, on a grid of `columns` by `rows` dots."""
    begin, end = points[0][0], points[-1][0]
    half = 0.5  # values are halved, because the difference of two large ones may be infinite
    extent = high * half - low * half
    dots: Grid = set()
    before: tuple[int, int] | None = None
    for step, value in points:
        x = round((step - begin) / (end - begin) * (columns - 1)) if end > begin else 0
        share = (value * half - low * half) / extent if extent else 0.5
        y = rows - 1 - round(share * (rows - 1))
        dots.update(_segment(before or (x, y), (x, y)))
        before = x, y
    return dots


def _segment(begin: tuple[int, int], end: tuple[int, int]) -> Grid:
    (x0, y0), (x1, y1) = begin, end
    count = max(abs(x1 - x0), abs(y1 - y0), 1)
    return {(round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)) for i in range(count + 1)}


def _row(grid: Grid, row: int, columns: int, *, braille: bool) -> str:
    """Return one line of characters: each stands for two columns and four rows of dots."""
    characters = []
    for column in range(columns):
        bits = sum(
            bit
            for x, of_column in enumerate(DOTS)
            for y, bit in enumerate(of_column)
            if (column * 2 + x, row * 4 + y) in grid
        )
        character = chr(BRAILLE + bits) if braille else STAR
        characters.append(character if bits else " ")
    return "".join(characters)
