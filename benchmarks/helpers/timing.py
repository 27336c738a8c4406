"""Time cases in interleaved rounds: medians, and ratios within a round.

A machine that others use too slows down for seconds at a time. Timing A and then B would charge that to one of
them, so a round times every case once, each round begins with another case, and what is quoted is the median
over rounds of the *ratio* of two cases of the same round.

    with pinned() as cpu:
        taken = measure([statement("plain", "plain(handlers, event)", 1000, names),
                         Case("my epoch", block=train_one_epoch)], rounds=15)
    taken["my epoch"].ratio_to(taken["plain"])
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from itertools import repeat
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import msgspec

from benchmarks.helpers.in_short import insert

NOT_INSTALLED = "not installed"
SETTLE_SECONDS = 0.002
"""Pause after a clean-up, for the threads it woke to fall asleep again."""


@dataclass(frozen=True)
class Case:
    """Something to time: `block` does it `number` times; `after`, untimed, cleans up (drains a queue, say)."""

    name: str
    block: Callable[[], object]
    number: int = 1
    after: Callable[[], object] | None = None


@dataclass
class Taken:
    """The times of one case: seconds per repetition, one a round."""

    name: str
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median over the rounds, in seconds."""
        return statistics.median(self.seconds)

    @property
    def ns(self) -> float:
        """The median in nanoseconds."""
        return self.median * 1e9

    @property
    def least_ns(self) -> float:
        """The fastest round, in nanoseconds: what the machine does when nobody else uses it."""
        return min(self.seconds) * 1e9

    def ratio_to(self, baseline: Taken) -> float:
        """Median over the rounds of this case's time divided by the baseline's time in the same round."""
        return statistics.median(a / b for a, b in zip(self.seconds, baseline.seconds, strict=True))

    def interval_to(self, baseline: Taken) -> tuple[float, float]:
        """The 95 % confidence interval of `ratio_to`, of whatever distribution: the ratios of the rounds that are as
        far before and behind the median as a fair coin's heads may be from half its throws (the sign test's)."""
        ratios = sorted(a / b for a, b in zip(self.seconds, baseline.seconds, strict=True))
        count = len(ratios)
        first = max(0, int((count - 1.96 * count**0.5) / 2))
        return ratios[first], ratios[count - 1 - first]

    def record(self) -> dict[str, float]:
        """What the JSON keeps: median, quartiles and minimum in nanoseconds."""
        low, middle, high = (
            statistics.quantiles(self.seconds, n=4) if len(self.seconds) > 1 else self.seconds * 3
        )
        times = {"median": middle, "quartile_1": low, "quartile_3": high, "least": min(self.seconds)}
        return {f"{key}_ns": round(value * 1e9, 1) for key, value in times.items()}


def statement(
    name: str,
    source: str,
    number: int,
    names: Mapping[str, Any] | None = None,
    after: Callable[[], object] | None = None,
) -> Case:
    """A case that repeats one statement in a compiled loop, as `timeit` does: no call is added to what is timed.
    `names` are its variables, fast locals as in a function that looked them up before its loop."""
    bound: dict[str, Any] = {**(names or {}), "_repeat": repeat, "_number": number}
    lines = [
        f"def block({', '.join(f'{n}={n}' for n in bound)}):",
        "    for _ in _repeat(None, _number):",
        f"        {source}",
    ]
    exec("\n".join(lines), bound)
    return Case(name, bound["block"], number, after)


def measure(
    cases: Sequence[Case], *, rounds: int, warm_up: int = 2, clock: Callable[[], float] = perf_counter
) -> dict[str, Taken]:
    """Time every case once a round, the collector off while a block runs; the warm-up rounds are not kept."""
    taken = {case.name: Taken(case.name) for case in cases}
    if len(taken) != len(cases):
        raise ValueError("two cases have the same name")
    for turn in range(-warm_up, rounds):
        start = turn % len(cases)
        for case in (*cases[start:], *cases[:start]):
            seconds = _time(case, clock)
            if turn >= 0:
                taken[case.name].seconds.append(seconds)
    return taken


def _time(case: Case, clock: Callable[[], float]) -> float:
    collecting = gc.isenabled()
    gc.disable()
    try:
        began = clock()
        case.block()
        seconds = clock() - began
    finally:
        if collecting:
            gc.enable()
    if case.after is not None:
        case.after()
        sleep(SETTLE_SECONDS)
    return seconds / case.number


@contextmanager
def pinned() -> Iterator[int | None]:
    """Keep the calling thread on one CPU, where the system can; threads started before roam as they did."""
    if not hasattr(os, "sched_setaffinity"):
        yield None
        return
    allowed = os.sched_getaffinity(0)
    cpu = max(allowed)  # the first one serves most interrupts
    os.sched_setaffinity(0, {cpu})
    try:
        yield cpu
    finally:
        os.sched_setaffinity(0, allowed)


def version_of(distribution: str) -> str:
    """The installed version, or "not installed": a peer that is absent is named, never dropped."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


def environment(*distributions: str) -> dict[str, str]:
    """What a reader needs in order to repeat the run: machine, python, and the versions of `distributions`."""
    about = {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }
    return about | {name: version_of(name) for name in distributions}


def command_line(module: str) -> str:
    """The command that started this run, to stand above its results; files are named without their folders."""
    return " ".join(["python -m", module, *(Path(a).name if "/" in a else a for a in sys.argv[1:])])


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that reads well in a terminal and in a committed file; the columns after the first align right."""
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        first = row[0].ljust(widths[0])
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        return f"| {' | '.join((first, *rest))} |"

    rule = f"|{'-' * (widths[0] + 2)}|" + "".join(f"{'-' * (w + 1)}:|" for w in widths[1:])
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])


def yes_no(met: bool) -> str:
    """How a goal's outcome is printed."""
    return "yes" if met else "NO"


def publish(
    report: str, record: Any, short: Callable[[Any], str], *, json: Path | None, markdown: Path | None
) -> None:
    """Print a report and keep it, and its record, where the command line asked for.

    `short` makes the section that opens the report, of the record as the JSON file has it.
    """
    kept = msgspec.json.encode(record)
    page = insert(report, short(msgspec.json.decode(kept)))
    print(page)
    if markdown is not None:
        markdown.write_text(page + "\n", encoding="utf-8")
    if json is not None:
        json.write_bytes(msgspec.json.format(kept, indent=2) + b"\n")
