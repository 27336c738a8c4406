"""Draw the statistical comparison of two runs for a terminal."""

from __future__ import annotations

from math import isfinite
from textwrap import wrap
from typing import NamedTuple

from eventloop.reporting.diff.comparing import LEAST, Diff, DiffRow, DiffRun
from eventloop.reporting.diff.scores import ScoreRow, Scores
from eventloop.reporting.diff.series import ITERATION, WARM_UP
from eventloop.reporting.tables import encodable, plain
from eventloop.util.formatting import ABSENT, duration, on_a_line, table, value_text

WIDTH = 80
"""The width of a line in characters. Long names are cut, except the paths of the runs."""
LEAST_NAME = 16
"""The least width in characters to which names are cut."""
FOLDED = 0.01
"""Handlers that differ only by noise, and by less than this part of an iteration, share one line."""
HEADER = ["phase or handler", "A", "B", "B - A, %", "95 % interval", ""]
SCORES_NOTE = (
    "Scores: A and B are the values at the last step that both runs have. mean B - A is over the pairs "
    f"of equal step, without the first {WARM_UP:.0%}. Noise: the interval contains 0, or the mean is below "
    "what it changes over the runs. Other seeds alone change scores as well."
)
SCORES_HEADER = ["score", "A", "B", "mean B - A", "95 % interval", "pairs", ""]
QUIET = frozenset({"noise", "unknown", "equal"})
"""The verdicts whose rows are drawn dim."""


class Line(NamedTuple):
    """Hold a line of the output, and whether it is drawn dim."""

    text: str
    dim: bool = False


def diff_lines(
    diff: Diff, encoding: str = "utf-8", *, width: int = WIDTH, everything: bool = False
) -> list[Line]:
    """Return the lines of a comparison: the runs, a table of times, a table of scores, and explanations.

    Args:
        encoding: the encoding of the output; characters that it lacks are replaced.
        width: the width of a line in characters.
        everything: whether handlers that share a line, as `FOLDED` says, get rows of their own.
    """
    shown = [row for row in diff.rows if everything or not _is_folded(row, diff.iteration)]
    cells = [_cells(row, diff) for row in shown]
    head, rule, *rows = _table(HEADER, cells, encoding, width)
    lines = [*map(Line, (_run("A", diff.a), _run("B", diff.b), "", head, rule))]
    lines += [Line(line, row.verdict in QUIET) for line, row in zip(rows, shown, strict=True)]
    if folded := len(diff.rows) - len(shown):
        text = f"{folded} more handlers differ by noise below {FOLDED:.0%} of an iteration (--all shows them)"
        lines.append(Line(text, dim=True))
    lines += [Line(""), *map(Line, _notes(diff, width))]
    if diff.scores is not None:
        lines += _score_lines(diff.scores, encoding, width)
    return lines


def _table(header: list[str], cells: list[list[str]], encoding: str, width: int) -> list[str]:
    """Return the lines of a table; names are cut so that it fits the width, but not below `LEAST_NAME`."""
    other_columns = [*zip(header, *cells, strict=True)][1:]
    other_width = sum(2 + max(map(len, column)) for column in other_columns)
    for row in cells:
        row[0] = on_a_line(row[0], max(LEAST_NAME, width - other_width))
    text = table(header, cells, right=range(1, len(header) - 1))
    return (text if encodable(text, encoding) else plain(text, encoding)).splitlines()


def _score_lines(scores: Scores, encoding: str, width: int) -> list[Line]:
    """Return the lines of a table of scores, and notes on it and on the steps that are not compared."""
    if not scores.rows:
        return [Line(""), Line(scores.missing)]
    head, rule, *rows = _table(SCORES_HEADER, [_score_cells(row) for row in scores.rows], encoding, width)
    lines = [*map(Line, ("", head, rule))]
    lines += [Line(line, row.verdict in QUIET) for line, row in zip(rows, scores.rows, strict=True)]
    text = "\n".join([SCORES_NOTE, *_unshared(scores.rows), *_not_finite(scores.rows)])
    notes = (text if encodable(text, encoding) else plain(text, encoding)).splitlines()
    return [*lines, Line(""), *(Line(line) for note in notes for line in wrap(note, width))]


def _score_cells(row: ScoreRow) -> list[str]:
    """Return the cells of a score: both last values, the mean difference, its interval and the verdict."""
    values = [ABSENT if value is None else value_text(value) for value in (row.a, row.b)]
    mean = ABSENT if row.difference is None else f"{row.difference:+.3g}"
    interval = ABSENT if row.low is None else f"{row.low:+.2g} to {row.high:+.2g}"
    return [_score_name(row), *values, mean, interval, f"{row.pairs:,}", row.verdict]


def _score_name(row: ScoreRow) -> str:
    return on_a_line(f"{row.mode} {row.name}")


def _unshared(rows: list[ScoreRow]) -> list[str]:
    """Return lines on the steps that only one run has, one line for scores with equal counts of them."""
    names: dict[str, list[str]] = {}
    for row in rows:
        counts = ", ".join(f"{n:,} of {run}" for run, n in (("A", row.only_a), ("B", row.only_b)) if n)
        if counts and not row.verdict.startswith("only"):
            names.setdefault(counts, []).append(_score_name(row))
    return [
        f"Steps of one run only, not compared: {counts} ({', '.join(scores)})."
        for counts, scores in names.items()
    ]


def _not_finite(rows: list[ScoreRow]) -> list[str]:
    """Return a line for each score of a run that has NaN or infinite values."""
    return [
        f"NaN or infinite, left out: {_score_name(row)} of {run} ({count:,}, first at step {first:,})."
        for row in rows
        for run, count, first in (
            ("A", row.not_finite_a, row.first_not_finite_a),
            ("B", row.not_finite_b, row.first_not_finite_b),
        )
        if first is not None
    ]


def _is_folded(row: DiffRow, iteration: float) -> bool:
    return row.kind == "handler" and row.verdict in QUIET and abs(row.difference) < FOLDED * iteration


def regression_line(diff: Diff) -> str:
    """Return the result of `--fail-above` on one line, with the rows that are slower than its limit."""
    limit = f"{diff.fail_above:g} % of an iteration"
    if not diff.failed:
        passed = f"--fail-above: no row is slower by more than {limit}"
        if _noise(diff) > (diff.fail_above or 0.0) / 100:
            return (
                f"{passed}, but a slower iteration could not be told: {_noise_text(diff)}; train longer, or "
                "on a quieter machine"
            )
        return passed
    failed_rows = [
        f"{row.name} by {_percent(row.difference, diff.iteration)} % ({_interval(row, diff.iteration)})"
        for row in diff.rows
        if row.name in diff.failed
    ]
    return f"--fail-above: slower by more than {limit}: {'; '.join(failed_rows)}"


def _run(letter: str, run: DiffRun) -> str:
    state = "" if run.complete else ", under way or killed"
    return on_a_line(f"{letter}  {run.run}  {run.iterations:,} iterations{state}")


def _cells(row: DiffRow, diff: Diff) -> list[str]:
    """Return the cells of a row: times an iteration, or totals for occasional work."""
    iteration = diff.iteration
    times = (row.a, diff.a), (row.b, diff.b)
    if row.kind in ("outside", "wait"):  # they are occasional, so the total is shown
        totals = [ABSENT if s is None else f"{duration(s * run.iterations)} in all" for s, run in times]
        return [row.name, *totals, ABSENT, ABSENT, row.verdict]
    means = [ABSENT if seconds is None else duration(seconds) for seconds, _ in times]
    return [row.name, *means, _percent(row.difference, iteration), _interval(row, iteration), row.verdict]


def _interval(row: DiffRow, iteration: float) -> str:
    if row.low is None or row.high is None:
        return ABSENT
    return f"{_percent(row.low, iteration)} to {_percent(row.high, iteration)}"


def _percent(seconds: float, iteration: float) -> str:
    percent = seconds / iteration * 100
    return f"{percent:+.1f}" if abs(percent) < 1000 or not isfinite(percent) else f"{percent:+.3g}"


def _notes(diff: Diff, width: int) -> list[str]:
    """Return the lines under the table that explain its times and what counts as noise."""
    text = (
        f"Times of an iteration, without the first {WARM_UP:.0%} of a run: the lower decile of the trend's "
        "points, or their mean where work is rare. B - A is in percent of an iteration of A. Noise: the "
        f"interval contains 0, or the difference is below {LEAST:.1%} of an iteration, or below what the row "
        f"differs within a run. Of whole iterations, {_noise_text(diff)}."
    )
    return wrap(text, width)


def _noise(diff: Diff) -> float:
    """Return the noise of the row of the whole iteration, as a part of an iteration of A."""
    return (next(row.noise for row in diff.rows if row.name == ITERATION) or 0.0) / diff.iteration


def _noise_text(diff: Diff) -> str:
    return f"differences below {_noise(diff) * 100:.1f} % are noise in these runs"
