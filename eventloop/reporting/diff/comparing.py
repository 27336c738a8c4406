"""Compare two runs row by row; decide which differences are more than noise, and which exceed a limit."""

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
"""Every difference below this part of an iteration is noise.

Two processes of one program may differ by as much, because their memory is laid out differently
(`benchmarks.report_diff`).
"""
Verdict = Literal["slower", "faster", "noise", "unknown", "only in A", "only in B"]
"""The result for a row. `unknown` means without an interval: few points, or calls that were not measured."""


class DiffRow(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the seconds per iteration of a phase, a handler, or the waits of one cause, in two runs."""

    name: str
    kind: Kind
    a: float | None
    """The seconds in the first run; None if the handler was not called there."""
    b: float | None
    difference: float
    """The seconds of B minus those of A; they are 0 for a run without the handler."""
    ratio: float | None = None
    """The ratio of B to A."""
    low: float | None = None
    """The lower end of the 95 % interval of the difference."""
    high: float | None = None
    noise: float | None = None
    """Differences up to this size are noise, even if the interval does not contain 0."""
    compared: Statistic = "mean"
    verdict: Verdict


class DiffRun(msgspec.Struct, frozen=True, kw_only=True):
    """Describe one of the two compared runs."""

    run: str
    """The run's directory, as it was given."""
    iterations: int
    complete: bool
    """Whether the run has ended; if not, it is under way or was killed."""


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the comparison of two runs, as `eventloop report A B --diff --json` prints it.

    diff = compare(load_report(Path("runs/a")), load_report(Path("runs/b")))
    [row.name for row in diff.rows if row.verdict == "slower"]
    """

    version: int = VERSION
    a: DiffRun
    b: DiffRun
    iteration: float
    """The seconds of an iteration of A, to which percentages refer."""
    rows: list[DiffRow]
    """First the handlers that only one run has, then all other rows, those with large differences first.

    A handler that is called outside of iterations has a row only if one run lacks it. The waits outside of
    iterations have a row for each cause, without an interval.
    """
    fail_above: float | None = None
    """The limit of `--fail-above`, in percent of an iteration of A; None without a limit."""
    failed: list[str] = []
    """The names of the rows that are slower by more than the limit."""
    scores: Scores | None = None
    """The comparison of the scores by `compare_scores`; the limit does not apply to it."""


def compare(a: Report, b: Report, fail_above: float | None = None) -> Diff:
    """Compare the costs of two runs.

    A row is slower or faster if its interval does not contain 0 and the difference is more than noise. Noise
    is the larger of `LEAST` and the row's `spread` within a run: the load of the machine may change between
    two runs as much as within one run, which the interval does not include. If the deciles do not differ and
    the work is rare, the means are compared.

    Args:
        fail_above: a limit in percent of A's iteration. A row fails if it is slower and the lower end of its
            interval is above the limit.

    Raises:
        ValueError: a run has no costs, or too few iterations.
    """
    with np.errstate(all="ignore"):  # a damaged file may have impossible times
        (run_a, first, points_a), (run_b, second, points_b) = _series(a), _series(b)
        iteration = difference(points_a, points_b)
        for run, seconds in ((run_a, iteration.a), (run_b, iteration.b)):
            if not 0 < seconds < inf:
                raise ValueError(
                    f"{run.run} has no times to compare: expected iterations of more than 0 s, "
                    f"got {seconds:g} s"
                )
        names = [name for name in {**first, **second} if _is_shown(name, first, second)]
        rows = [_row(name, first.get(name), second.get(name), iteration.a) for name in names]
    rows.sort(key=_order)
    limit = inf if fail_above is None else fail_above / 100 * iteration.a
    failed = [row.name for row in rows if row.verdict == "slower" and (row.low or 0.0) > limit]
    return Diff(a=run_a, b=run_b, iteration=iteration.a, rows=rows, fail_above=fail_above, failed=failed)


def _series(report: Report) -> tuple[DiffRun, dict[str, Series], Points]:
    """Return the description of a run, its series by name, and the points of its whole iteration.

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
    """Return the sort key of a row.

    It puts handlers that only one run has first, those in iterations before those outside, and then the rows
    with the largest differences.
    """
    in_one_run = row.verdict.startswith("only")
    # times that are equal but for rounding, within 1e-12 s, do not change the order of rows
    return not in_one_run, in_one_run and row.kind == "outside", -round(abs(row.difference), 12)


def _is_shown(name: str, first: dict[str, Series], second: dict[str, Series]) -> bool:
    """Return whether a series gets a row.

    There is no row for waits that neither run has, and none for handlers that both runs call only outside of
    iterations.
    """
    series = [run[name] for run in (first, second) if name in run]
    if name in WAIT_ROWS and not any(one.mean for one in series):
        return False
    return len(series) < 2 or any(one.kind != "outside" for one in series)


def _row(name: str, a: Series | None, b: Series | None, iteration: float) -> DiffRow:
    """Compare one series in two runs by the rules of `compare`.

    Args:
        iteration: the seconds of an iteration of A.
    """
    present = a or b
    assert present is not None
    row = DiffRow(name=name, kind=present.kind, a=None, b=None, difference=0.0, verdict="unknown")
    row = _with_times(row, a and a.mean, b and b.mean)
    if a is None:
        return replace(row, verdict="only in B")
    if b is None:
        return replace(row, verdict="only in A")
    if a.points is None or b.points is None:
        return row
    result = difference(a.points, b.points)
    noise = max(LEAST * iteration, result.spread)
    if _is_noise(result, noise) and (rare(a.points) or rare(b.points)):
        result = difference(a.points, b.points, "mean")
        noise = max(LEAST * iteration, result.spread)
    verdict: Verdict = "slower" if result.b > result.a else "faster"
    return replace(
        _with_times(row, result.a, result.b),
        verdict="noise" if _is_noise(result, noise) else verdict,
        low=result.low,
        high=result.high,
        noise=noise,
        compared=result.statistic,
    )


def _with_times(row: DiffRow, a: float | None, b: float | None) -> DiffRow:
    """Return a row with the times of both runs, their difference and their ratio."""
    ratio = b / a if a is not None and b is not None and a > 0 else None
    return replace(row, a=a, b=b, difference=(b or 0.0) - (a or 0.0), ratio=ratio)


def _is_noise(result: Difference, noise: float) -> bool:
    return abs(result.b - result.a) <= noise or result.low <= 0 <= result.high
