"""What the tables of a report are made of."""

from __future__ import annotations

from typing import NamedTuple

from eventloop.costs.records import Phases, Times
from eventloop.util.formatting import ABSENT, duration, three_digits


class Table(NamedTuple):
    """Rows of texts; the first column is a name."""

    title: str
    header: list[str]
    rows: list[list[str]]
    left: int = 1
    """Columns that are texts, from the left; the others are numbers."""
    bad: frozenset[int] = frozenset()
    """The rows that somebody should look at."""
    why: str = ""
    """They should."""
    lines: list[list[float]] | None = None
    """A curve for each row."""
    note: str = ""
    """One or more lines."""


def milliseconds(seconds: float, phases: Phases) -> str:
    """Of an iteration."""
    return three_digits(seconds / phases.iterations * 1e3) if phases.iterations else ABSENT


def microseconds(seconds: float, phases: Phases) -> str:
    """Of an iteration."""
    return three_digits(seconds / phases.iterations * 1e6) if phases.iterations else ABSENT


def percentiles(times: Times) -> list[str]:
    """The median and the 99th of a hundred."""
    return [duration(times.p50), duration(times.p99)] if times.samples else [ABSENT, ABSENT]


def longest(times: Times) -> str:
    """Of those that were measured."""
    return duration(times.max) if times.samples else ABSENT


def some_of(all_of_them: int, samples: int) -> str:
    """A count of calls, and how many of them were measured unless all were."""
    return f"{all_of_them:,}" if samples >= all_of_them else f"{all_of_them:,} ({samples:,} sampled)"


def step(number: int | None) -> str:
    """Of a run."""
    return ABSENT if number is None else f"{number:,}"
