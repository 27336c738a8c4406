"""Find the best and last scores of a run, and its durable checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from eventloop.checkpoint.listing import Item, Stock
from eventloop.checkpoint.retention.best import infer_rule
from eventloop.costs.step_clock import TIMES
from eventloop.ownership.status import read_status
from eventloop.reporting.curves import Curve


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the last and the best score of one metric of a run's validations or tests."""

    name: str
    """The mode and the name, such as "val/accuracy"."""
    last: float
    last_step: int
    best: float | None
    """The best score; None if no score is finite, or it is unknown whether greater is better."""
    best_step: int | None


def scores_of(curves: Sequence[Curve]) -> list[Score]:
    """Return a `Score` for each metric of validations and tests, in the order of their first records."""
    return [_score(curve) for curve in curves if curve.mode in ("val", "test") and curve.name not in TIMES]


def _score(curve: Curve) -> Score:
    """Return the last score of a metric, and the best one if its name shows whether greater is better."""
    best, step = None, None
    with suppress(ValueError):  # the name does not show whether greater is better
        if infer_rule(curve.name) == "greater":
            best, step = curve.greatest, curve.greatest_step
        else:
            best, step = curve.least, curve.least_step
    return Score(
        name=f"{curve.mode}/{curve.name}",
        last=curve.last,
        last_step=curve.last_step,
        best=None if step is None else best,
        best_step=step,
    )


def checkpoints_of(run: Path) -> list[Item]:
    """Return the durable checkpoints of a run, of one directory after another, each oldest first.

    The names of those outside of the run's directory begin with the path of their directory. A directory
    that cannot be read has no checkpoints.
    """
    checkpoints: list[Item] = []
    beat = None
    with suppress(OSError):
        beat = read_status(run)
    directories = beat.status.checkpoints if beat is not None and beat.status is not None else []
    for directory in dict.fromkeys([".", *directories]):
        with suppress(OSError):
            for item in Stock(run / directory).inventory().checkpoints:
                name = item.name if directory == "." else f"{directory}/{item.name}"
                checkpoints.append(msgspec.structs.replace(item, name=name))
    return checkpoints
