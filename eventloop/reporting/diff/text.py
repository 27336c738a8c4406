"""Draw the comparison of two runs for a terminal."""

from __future__ import annotations

from math import isfinite
from textwrap import wrap
from typing import NamedTuple

from eventloop.reporting.diff.comparing import LEAST, Diff, DiffRow, DiffRun
from eventloop.reporting.diff.series import ITERATION, WARM_UP
from eventloop.reporting.tables import encodable, plain
from eventloop.util.formatting import ABSENT, duration, on_a_line, table

WIDTH = 80
"""The width of a line in characters. Long names are cut, except the paths of the runs, and in JSON."""
LEAST_NAME = 16
FOLDED = 0.01
"""The part of an iteration below which a handler without a real difference shares a line."""
HEADER = ["phase or handler", "A", "B", "B - A, %", "95 % interval", ""]
QUIET = frozenset({"noise", "unknown"})
"""The verdicts whose rows are dimmed."""


class Line(NamedTuple):
    """A line of the output, and whether it is dimmed."""

    text: str
    dim: bool = False


def diff_lines(
    diff: Diff, encoding: str = "utf-8", *, width: int = WIDTH, everything: bool = False
) -> list[Line]:
    """Return the two runs, a row for each phase and handler, and an explanation of the figures.

    Args:
        encoding: the encoding of the output; characters that it lacks are replaced.
        width: the width of a line in characters.
        everything: whether handlers that differ by noise below 1 % of an iteration have rows, too.
    """
    shown = [row for row in diff.rows if everything or not _is_folded(row, diff.iteration)]
    cells = [_cells(row, diff) for row in shown]
    others = sum(2 + max(map(len, column)) for column in list(zip(HEADER, *cells, strict=True))[1:])
    for row in cells:
        row[0] = on_a_line(row[0], max(LEAST_NAME, width - others))
    text = table(HEADER, cells, right=(1, 2, 3, 4))
    head, rule, *rows = (text if encodable(text, encoding) else plain(text, encoding)).splitlines()
    drawn = [Line(line, row.verdict in QUIET) for line, row in zip(rows, shown, strict=True)]
    if folded := len(diff.rows) - len(shown):
        text = f"{folded} more handlers differ by noise below {FOLDED:.0%} of an iteration (--all shows them)"
        drawn.append(Line(text, dim=True))
    return [
        *map(Line, (_run("A", diff.a), _run("B", diff.b), "", head, rule)),
        *drawn,
        Line(""),
        *map(Line, _notes(diff, width)),
    ]


def _is_folded(row: DiffRow, iteration: float) -> bool:
    return row.kind == "handler" and row.verdict in QUIET and abs(row.difference) < FOLDED * iteration


def regression_line(diff: Diff) -> str:
    """Return the result of the regression gate, `--fail-above`, on one line, with the rows above it."""
    limit = f"{diff.fail_above:g} % of an iteration"
    if not diff.failed:
        passed = f"--fail-above: no row is slower by more than {limit}"
        if _noise(diff) > (diff.fail_above or 0.0) / 100:
            return (
                f"{passed}, but a slower iteration could not be told: {_noise_text(diff)}; train longer, or "
                "on a quieter machine"
            )
        return passed
    each = [
        f"{row.name} by {_percent(row.difference, diff.iteration)} % ({_interval(row, diff.iteration)})"
        for row in diff.rows
        if row.name in diff.failed
    ]
    return f"--fail-above: slower by more than {limit}: {'; '.join(each)}"


def _run(letter: str, run: DiffRun) -> str:
    state = "" if run.complete else ", under way or killed"
    return on_a_line(f"{letter}  {run.run}  {run.iterations:,} iterations{state}")


def _cells(row: DiffRow, diff: Diff) -> list[str]:
    iteration = diff.iteration
    times = (row.a, diff.a), (row.b, diff.b)
    if row.kind in ("outside", "wait"):  # occasional: the total says more than a time an iteration
        whole = [ABSENT if s is None else f"{duration(s * run.iterations)} in all" for s, run in times]
        return [row.name, *whole, ABSENT, ABSENT, row.verdict]
    each = [ABSENT if seconds is None else duration(seconds) for seconds, _ in times]
    return [row.name, *each, _percent(row.difference, iteration), _interval(row, iteration), row.verdict]


def _interval(row: DiffRow, iteration: float) -> str:
    if row.low is None or row.high is None:
        return ABSENT
    return f"{_percent(row.low, iteration)} to {_percent(row.high, iteration)}"


def _percent(seconds: float, iteration: float) -> str:
    percent = seconds / iteration * 100
    return f"{percent:+.1f}" if abs(percent) < 1000 or not isfinite(percent) else f"{percent:+.3g}"


def _notes(diff: Diff, width: int) -> list[str]:
    text = (
        f"Times of an iteration, without the first {WARM_UP:.0%} of a run: the lower decile of the trend's "
        "points, or their mean where work is rare. B - A is in percent of an iteration of A. Noise: the "
        f"interval contains 0, or the difference is below {LEAST:.1%} of an iteration, or below what the row "
        f"differs within a run. Of whole iterations, {_noise_text(diff)}."
    )
    return wrap(text, width)


def _noise(diff: Diff) -> float:
    """Return the part of an iteration up to which a difference between whole iterations is noise."""
    return (next(row.noise for row in diff.rows if row.name == ITERATION) or 0.0) / diff.iteration


def _noise_text(diff: Diff) -> str:
    return f"differences below {_noise(diff) * 100:.1f} % are noise in these runs"
