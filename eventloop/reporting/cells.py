"""Build the cells of a report's tables: numbers and times as text.

`tables` and `handlers` put the tables together.
"""

from __future__ import annotations

from typing import NamedTuple

from eventloop.costs.records import Phases, Times
from eventloop.util.formatting import ABSENT, duration, three_digits


class Table(NamedTuple):
    """A table of texts with a title; the first column has the names of the rows."""

    title: str
    header: list[str]
    rows: list[list[str]]
    left: int = 1
    """Number of text columns, from the left; the other columns are numbers."""
    bad: frozenset[int] = frozenset()
    """Indices of the rows to highlight."""
    why: str = ""
    """The reason why rows are highlighted."""
    lines: list[list[float]] | None = None
    """A curve for each row, drawn next to it."""
    note: str = ""
    """One or more lines below the table."""


def milliseconds(seconds: float, phases: Phases) -> str:
    """Format the mean time of an iteration in milliseconds; `seconds` is the sum over `phases.iterations`."""
    return three_digits(seconds / phases.iterations * 1e3) if phases.iterations else ABSENT


def microseconds(seconds: float, phases: Phases) -> str:
    """Format the mean time of an iteration in microseconds; `seconds` is the sum over `phases.iterations`."""
    return three_digits(seconds / phases.iterations * 1e6) if phases.iterations else ABSENT


def percentiles(times: Times) -> list[str]:
    """Format the median and the 99th percentile of measured times."""
    return [duration(times.p50), duration(times.p99)] if times.samples else [ABSENT, ABSENT]


def longest(times: Times) -> str:
    """Format the longest measured time."""
    return duration(times.max) if times.samples else ABSENT


def calls_text(calls: int, samples: int) -> str:
    """Format a count of calls, with the number of measured calls if not all were measured."""
    return f"{calls:,}" if samples >= calls else f"{calls:,} ({samples:,} sampled)"


def step(number: int | None) -> str:
    """Format a step of a run, or the sign for a missing value."""
    return ABSENT if number is None else f"{number:,}"
