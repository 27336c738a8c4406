"""Format numbers for people: durations, counts, shares, and rows of block characters."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import fmean, median

from eventloop.util.printable import printable

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-:=+*#"
ABSENT = "-"
"""The text for a missing number in a table."""
_SPACE = re.compile(r"\s")


def duration(seconds: float) -> str:
    """Format a duration with three digits and a unit: `18.3 µs`, `4.31 ms`, `12.5 min`."""
    if not math.isfinite(seconds):
        return ABSENT
    if seconds == 0:
        return "0 s"
    for unit, size, next_size in (
        ("ns", 1e-9, 1e-6),
        ("µs", 1e-6, 1e-3),
        ("ms", 1e-3, 1.0),
        ("s", 1.0, 120.0),
    ):
        if abs(seconds) < next_size * 0.9995:
            return f"{three_digits(seconds / size)} {unit}"
    if seconds < 7200:
        return f"{three_digits(seconds / 60)} min"
    return f"{three_digits(seconds / 3600)} h"


def three_digits(number: float) -> str:
    """Format a number with at least three digits: `0.123`, `1.23`, `12.3`, `123`, `1,234`."""
    limits = ((0.9995, 3), (9.995, 2), (99.95, 1))  # below the limit, so many digits after the point
    digits = next((digits for limit, digits in limits if abs(number) < limit), 0)
    return f"{number:,.{digits}f}"


def memory_size(size: int) -> str:
    """Format a number of bytes as `12.3 MiB`, or as `1.23 GiB` from 1 GiB on."""
    unit, length = ("GiB", 1 << 30) if size >= 1 << 30 else ("MiB", 1 << 20)
    return f"{three_digits(size / length)} {unit}"


def count_or_time(number: float) -> str:
    """Format an int, which is a count, with all its digits, and a float, a time, with three digits."""
    return f"{number:,}" if isinstance(number, int) else three_digits(number)


def on_a_line(text: str, width: int | None = None) -> str:
    """Put `text` on one line, with escapes for control characters.

    Args:
        width: the largest number of characters; "…" replaces the middle of a longer text. None sets no limit.
    """
    line = printable(_SPACE.sub(" ", text))
    if width is None or len(line) <= width:
        return line
    head = width // 2
    tail = width - head - 1
    return f"{line[:head]}…{line[len(line) - tail :]}"


def share(part: float, whole: float) -> str:
    """Format `part / whole` in percent: `12.3 %`; return "-" if `whole` is 0."""
    return f"{part / whole * 100:.1f} %" if whole else ABSENT


def ratio(number: float, first: float) -> str:
    """Format `number / first` as `1.23×`; return "-" if `first` is 0."""
    return f"{number / first:.2f}×" if first else ABSENT


def value_text(value: float) -> str:
    """Format a scalar with at most five significant digits."""
    return f"{value:.5g}"


def sparkline(
    values: Sequence[float], *, width: int = 32, from_zero: bool = False, blocks: str = BLOCKS
) -> str:
    """Draw values as a row of block characters, with "×" for values that are not finite.

        sparkline([1, 2, 3, 8])  # "▁▂▃█"

    Args:
        width: the largest number of characters; if there are more values, neighbours are averaged.
        from_zero: if true, the lowest block stands for 0, and the highest block for the largest value or for
            four times the median, whichever is less, so that slow first iterations do not flatten the rest.
            If false, the two blocks stand for the smallest and the largest value.
        blocks: the characters, from the lowest to the highest.
    """
    means = [_mean(values[begin:end]) for begin, end in _pieces(len(values), width)]
    finite = [mean for mean in means if not math.isnan(mean)]
    if not finite:
        return "×" * len(means)
    low, high = min(finite), max(finite)
    if from_zero:
        low, high = 0.0, min(high, 4 * median(finite)) or high
    return "".join(
        "×" if math.isnan(mean) else blocks[_level(mean, low, high, len(blocks))] for mean in means
    )


def _level(value: float, low: float, high: float, levels: int) -> int:
    """Return the index, below `levels`, of the block for a value in the range from `low` to `high`."""
    if high <= low:  # all values are equal
        return levels // 2 - 1 if high else 0
    if math.isinf(high - low):  # the difference of two finite numbers overflows
        value, low, high = value / 2, low / 2, high / 2
    return min(levels - 1, int((min(max(value, low), high) - low) / (high - low) * levels))


def _pieces(number: int, width: int) -> list[tuple[int, int]]:
    """Divide `number` items into at most `width` pieces of about equal length.

    Returns:
        the indices of the begin and end of each piece.
    """
    count = min(number, width)
    return [(number * i // count, number * (i + 1) // count) for i in range(count)]


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values, or nan if none of them is finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return math.nan
    try:
        mean = fmean(finite)
    except OverflowError:  # the sum is too large
        mean = math.fsum(value / len(finite) for value in finite)
    return min(max(mean, min(finite)), max(finite))  # rounding may leave the range of the values


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), rule: bool = True
) -> str:
    """Return a table as text, with columns as wide as their widest cell.

    Args:
        right: the indices of the columns that are aligned to the right.
        rule: whether a line is drawn below the header.
    """
    texts = [header, *([*map(on_a_line, row)] for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(header))]
    if rule:
        texts.insert(1, ["-" * width for width in widths])
    lines = []
    for row in texts:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
