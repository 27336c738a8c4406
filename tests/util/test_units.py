"""Numbers as people read them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from eventloop.util.formatting import (
    count_or_time,
    duration,
    on_a_line,
    ratio,
    share,
    sparkline,
    three_digits,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (3e-9, "3.00 ns"),
        (1.83e-5, "18.3 µs"),
        (9.999e-4, "1.00 ms"),
        (4.312e-3, "4.31 ms"),
        (0.9999, "1.00 s"),
        (1.2, "1.20 s"),
        (119.0, "119 s"),
        (750.0, "12.5 min"),
        (11_520.0, "3.20 h"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    """Three digits and the unit that fits."""
    assert duration(seconds) == text


def test_numbers() -> None:
    """Three digits; counts as they are; ratios and shares of nothing are a dash."""
    digits = [three_digits(n) for n in (0.1234, 1.234, 12.34, 1234.5, 9.996)]
    assert digits == ["0.123", "1.23", "12.3", "1,234", "10.0"]
    assert (count_or_time(12345), count_or_time(2.0)) == ("12,345", "2.00")
    assert (ratio(3, 2), ratio(3, 0), share(1, 8), share(1, 0)) == ("1.50×", "-", "12.5 %", "-")


@pytest.mark.parametrize(
    ("values", "options", "line"),
    [
        ([1, 2, 3, 8], {}, "▁▂▃█"),
        ([5, 5], {}, "▄▄"),
        ([], {}, ""),
        ([1, 2], {"blocks": "_#"}, "_#"),
        ([0.0, 0.0, 8.0, 8.0], {"width": 2}, "▁█"),  # averages
        ([1, math.nan, 2], {}, "▁×█"),
        ([math.nan], {}, "×"),
        ([0.1] * 185, {}, "▄" * 32),  # whose means are rounded by different amounts
        ([-1e308, 1e308], {}, "▁█"),
        ([1.7e308] * 4, {"width": 2}, "▄▄"),  # neither sum nor difference is a number
        ([1e308, 1e308, -1e308, -1e308], {"width": 2}, "█▁"),
        ([1.7e308, 1.7e308, 1.0], {"from_zero": True}, "██▁"),
        ([1e-300, 1e-300, 1e308], {"from_zero": True}, "▃▃█"),
        ([100, 4, 2, 4, 4], {"from_zero": True}, "█▃▂▃▃"),  # the highest is four times the median at most
    ],
)
def test_sparklines(values: list[float], options: dict[str, Any], line: str) -> None:
    """The lowest block is the least value, or zero; what is not finite is a cross."""
    assert sparkline(values, **options) == line


def test_texts_on_a_line() -> None:
    """Line ends are spaces, what moves a cursor is shown, and the middle of what is too long is left out."""
    assert on_a_line("a\nb\tc\x1b[31m") == r"a b c\x1b[31m"
    assert (on_a_line("abcdefgh", 5), on_a_line("abcde", 5)) == ("ab…gh", "abcde")
