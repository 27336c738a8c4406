"""Compare the scores of two runs (metrics of validations and logged losses) at the steps that both have.

The two values at a step are a pair. The mean difference of the pairs gets an interval by the block bootstrap
of `bootstrap`. The interval holds for these two runs only: another seed alone changes scores, too.
"""

from __future__ import annotations

import re
from math import ceil, isfinite
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from eventloop.eventlog.jsonl import FILE_NAME
from eventloop.reporting.curves import Floats, Recorded, read_records
from eventloop.reporting.diff.bootstrap import difference
from eventloop.reporting.diff.series import WARM_UP

LEAST_PAIRS = 8
"""The fewest pairs after the warm-up for which an interval is computed."""
SCALE = "loss_scale"
"""A metric of mixed precision. Its name contains "loss", but it is not a loss."""
Verdict = Literal["higher", "lower", "equal", "noise", "unknown", "only in A", "only in B"]
"""The result for a score. `equal` means that all pairs are bitwise equal, `unknown` that they are too few."""


class ScoreRow(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the comparison of a metric of validations or tests, or of a logged loss, in two runs."""

    name: str
    mode: str
    """The mode of the records: train, val or test."""
    pairs: int = 0
    """The number of steps at which both runs have a finite value."""
    only_a: int = 0
    """The number of steps that only A has; they are not compared."""
    only_b: int = 0
    not_finite_a: int = 0
    """The number of steps at which A has NaN or an infinity; they are left out."""
    first_not_finite_a: int | None = None
    not_finite_b: int = 0
    first_not_finite_b: int | None = None
    last_step: int | None = None
    """The last step of the pairs; `a` and `b` are the values at this step."""
    a: float | None = None
    b: float | None = None
    difference: float | None = None
    """The mean of B - A over the pairs without the first tenth."""
    low: float | None = None
    """The lower end of the 95 % interval of the difference."""
    high: float | None = None
    noise: float | None = None
    """Differences up to this size are noise: the range of the mean of B - A over four parts of the runs."""
    verdict: Verdict = "unknown"


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the comparison of the scores of two runs."""

    rows: list[ScoreRow] = []
    """First the scores that only one run has, then those of validations and tests, then training losses."""
    missing: str = ""
    """A sentence if there are no scores to compare, else ""."""


def compare_scores(a: Path, b: Path) -> Scores:
    """Compare the scores in the `metrics.jsonl` of two runs.

    If a resumed run has logged a step again, the later value is compared, as in the curves of a report.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not empty, and JSONLWriter has written no line of it.
    """
    without = [name for name, run in (("A", a), ("B", b)) if not (run / FILE_NAME).is_file()]
    if without:
        return Scores(missing=f"No scores are compared: no {FILE_NAME} in {' and '.join(without)}.")
    first, second = (read_records(run / FILE_NAME, _is_score) for run in (a, b))
    rows = [_row(mode, name, first, second) for mode, name in {**first, **second}]
    rows.sort(key=lambda row: (not row.verdict.startswith("only"), row.mode == "train"))
    return Scores(rows=rows, missing="" if rows else f"No scores are compared: no {FILE_NAME} has any.")


def _is_score(mode: str, name: str) -> bool:
    """Return whether a scalar is compared: a metric of validations or tests, or a loss of the training."""
    words = re.split(r"[/_.]", name)
    return mode != "train" or ("loss" in words and name != SCALE)


def _row(
    mode: str, name: str, first: dict[tuple[str, str], Recorded], second: dict[tuple[str, str], Recorded]
) -> ScoreRow:
    """Compare one score; `first` and `second` have the records of each run by mode and name."""
    a, b = (_by_step(run.get((mode, name))) for run in (first, second))
    bad_a, bad_b = ([step for step, value in scores.items() if not isfinite(value)] for scores in (a, b))
    row = ScoreRow(
        name=name,
        mode=mode,
        only_a=len(a.keys() - b.keys()),
        only_b=len(b.keys() - a.keys()),
        not_finite_a=len(bad_a),
        first_not_finite_a=min(bad_a, default=None),
        not_finite_b=len(bad_b),
        first_not_finite_b=min(bad_b, default=None),
    )
    if not a or not b:
        return replace(row, verdict="only in A" if a else "only in B")
    shared = [step for step in sorted(a.keys() & b.keys()) if isfinite(a[step]) and isfinite(b[step])]
    if not shared:
        return row
    last = shared[-1]
    row = replace(row, pairs=len(shared), last_step=last, a=a[last], b=b[last])
    return _compared(row, np.array([[a[step], b[step]] for step in shared]))


def _by_step(records: Recorded | None) -> dict[int, float]:
    """Return the values of records by step; empty without records."""
    if records is None:
        return {}
    steps, values = records
    return dict(zip(steps.tolist(), values.tolist(), strict=True))


def _compared(row: ScoreRow, pairs: Floats) -> ScoreRow:
    """Return the row with the difference of the pairs, its interval and its verdict.

    Args:
        pairs: an array of shape (pairs, 2) with the values of A and B.
    """
    with np.errstate(all="ignore"):  # differences of very large values may overflow
        differences = np.diff(pairs[ceil(len(pairs) * WARM_UP) :] if len(pairs) > 1 else pairs)[:, 0]
        row = replace(row, difference=float(differences.mean()))
        if (pairs[:, 0] == pairs[:, 1]).all():
            return replace(row, verdict="equal")
        if len(differences) < LEAST_PAIRS or not np.isfinite(differences.sum()):
            return row
        # compared with zeros, the differences get an interval of their mean
        result = difference(np.zeros((1, len(differences))), differences[np.newaxis], "mean")
    is_noise = result.low <= 0 <= result.high or abs(result.b) <= result.spread
    verdict: Verdict = "higher" if result.b > 0 else "lower"
    return replace(
        row,
        low=result.low,
        high=result.high,
        noise=result.spread,
        verdict="noise" if is_noise else verdict,
    )
