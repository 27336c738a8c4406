"""Compare two runs row by row, and decide which differences are real and which fail a regression gate."""

from __future__ import annotations

from math import inf
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from eventloop.costs.records import FILE
from eventloop.reporting.diff.bootstrap import Difference, Points, Statistic, difference, rare
from eventloop.reporting.diff.scores import Scores
from eventloop.reporting.diff.series import (
    ITERATION,
    LEAST_ITERATIONS,
    WAIT_ROWS,
    Kind,
    Series,
    series_of,
)
from eventloop.reporting.report import Report

VERSION = 1
LEAST = 0.015
"""The part of an iteration below which every difference of a row counts as noise.

Two processes of the same program differ by as much, because their memory is laid out differently
(`benchmarks.report_diff`).
"""
Verdict = Literal["slower", "faster", "noise", "unknown", "only in A", "only in B"]
"""The result for one row. `unknown` means no interval: too few points, or calls that were not clocked."""


class DiffRow(msgspec.Struct, frozen=True, kw_only=True):
    """A phase, a handler or waits in two runs. All times are seconds an iteration."""

    name: str
    kind: Kind
    a: float | None
    """The seconds in the first run; None if the handler was not called there."""
    b: float | None
    difference: float
    """The seconds of B less those of A; a run that lacks the handler counts as 0."""
    ratio: float | None = None
    """The ratio of B to A."""
    low: float | None = None
    """Lower end of the 95 % interval of the difference."""
    high: float | None = None
    noise: float | None = None
    """The size of a difference up to which the verdict is `noise`, whatever the interval is."""
    compared: Statistic = "mean"
    verdict: Verdict


class DiffRun(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two compared runs."""

    run: str
    """The run's directory, as it was given."""
    iterations: int
    complete: bool
    """Whether the run has ended; otherwise it is under way or was killed."""


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two runs, as `eventloop report A B --diff --json` prints it.

    diff = compare(load_report(Path("runs/a")), load_report(Path("runs/b")))
    [row.name for row in diff.rows if row.verdict == "slower"]
    """

    version: int = VERSION
    a: DiffRun
    b: DiffRun
    iteration: float
    """Seconds of an iteration of A; percentages refer to it."""
    rows: list[DiffRow]
    """The rows: handlers that only one run has come first, then all others by the size of the difference.

    A handler that is called outside of iterations has a row only if one run lacks it. Waits of a cause
    outside of iterations have a row without an interval.
    """
    fail_above: float | None = None
    """The limit of the regression gate, in percent of an iteration of A; None without a gate."""
    failed: list[str] = []
    """The names of the rows that are slower by more than the limit."""
    scores: Scores | None = None
    """The comparison of the scores, by `compare_scores`; it decides nothing about the limit."""


def compare(a: Report, b: Report, fail_above: float | None = None) -> Diff:
    """Compare the costs of two runs.

    A row is slower or faster if its interval does not contain 0 and the difference is more than noise. Noise
    is the larger of `LEAST` and the row's `spread` within one run: the load of the machine may change between
    runs as much as within one, and the interval does not include that. Means are compared in place of lower
    deciles if the deciles do not differ and the work is rare.

    Args:
        fail_above: a limit in percent of A's iteration. Rows fail if they are slower and the lower end of
            their interval is above it.

    Raises:
        ValueError: a run has no costs, or too few iterations.
    """
    with np.errstate(all="ignore"):  # of impossible times in a file
        (run_a, first, points_a), (run_b, second, points_b) = _series(a), _series(b)
        whole = difference(points_a, points_b)
        for run, seconds in ((run_a, whole.a), (run_b, whole.b)):
            if not 0 < seconds < inf:
                raise ValueError(
                    f"{run.run} has no times to compare: expected iterations of more than 0 s, "
                    f"got {seconds:g} s"
                )
        names = [name for name in {**first, **second} if _is_shown(name, first, second)]
        rows = [_row(name, first.get(name), second.get(name), whole.a) for name in names]
    rows.sort(key=_order)
    limit = inf if fail_above is None else fail_above / 100 * whole.a
    failed = [row.name for row in rows if row.verdict == "slower" and (row.low or 0.0) > limit]
    return Diff(a=run_a, b=run_b, iteration=whole.a, rows=rows, fail_above=fail_above, failed=failed)


def _series(report: Report) -> tuple[DiffRun, dict[str, Series], Points]:
    """Return a run, its series and the points of its whole iteration.

    Raises:
        ValueError: the run has no costs, or too few iterations.
    """
    costs = report.costs
    if costs is None:
        raise ValueError(
            f"{report.run} has no costs to compare: expected {FILE}, which a run writes after some seconds, "
            "got a run without it"
        )
    iterations = costs.phases.iterations
    if not iterations:
        raise ValueError(
            f"{report.run} has no iterations to compare: expected a training, got a run without one"
        )
    series = series_of(costs)
    if (points := series[ITERATION].points) is None:
        raise ValueError(
            f"{report.run} is too short to compare: expected at least {LEAST_ITERATIONS} iterations, got "
            f"{iterations:,}, with {len(costs.trend):,} points in the trend"
        )
    return DiffRun(run=report.run, iterations=iterations, complete=costs.complete), series, points


def _order(row: DiffRow) -> tuple[bool, bool, float]:
    """Return the key by which rows are sorted.

    Handlers that only one run has come first, those in iterations before the others; then the largest
    difference.
    """
    only = row.verdict.startswith("only")
    return not only, only and row.kind == "outside", -round(abs(row.difference), 12)


def _is_shown(name: str, first: dict[str, Series], second: dict[str, Series]) -> bool:
    """Return whether a row is shown: not a handler outside of iterations in both runs, nor a wait in none."""
    runs = [run[name] for run in (first, second) if name in run]
    if name in WAIT_ROWS and not any(each.mean for each in runs):
        return False
    return len(runs) < 2 or any(each.kind != "outside" for each in runs)


def _row(name: str, a: Series | None, b: Series | None, iteration: float) -> DiffRow:
    known = a or b
    assert known is not None
    means = a and a.mean, b and b.mean
    verdict: Verdict = "only in B" if a is None else "only in A" if b is None else "unknown"
    row = _filled(
        DiffRow(name=name, kind=known.kind, a=None, b=None, difference=0.0, verdict=verdict), *means
    )
    if a is None or b is None or a.points is None or b.points is None:
        return row
    found = difference(a.points, b.points)
    noise = max(LEAST * iteration, found.spread)
    if _is_noise(found, noise) and (rare(a.points) or rare(b.points)):
        found = difference(a.points, b.points, "mean")
        noise = max(LEAST * iteration, found.spread)
    verdict = "noise" if _is_noise(found, noise) else "slower" if found.b > found.a else "faster"
    ends = {"low": found.low, "high": found.high, "noise": noise, "compared": found.statistic}
    return replace(_filled(row, found.a, found.b), verdict=verdict, **ends)


def _filled(row: DiffRow, a: float | None, b: float | None) -> DiffRow:
    """Return a row with the times of both runs, their difference and their ratio."""
    ratio = b / a if a is not None and b is not None and a > 0 else None
    return replace(row, a=a, b=b, difference=(b or 0.0) - (a or 0.0), ratio=ratio)


def _is_noise(found: Difference, noise: float) -> bool:
    return abs(found.b - found.a) <= noise or found.low <= 0 <= found.high
