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
    """The scores of one metric of the validations or tests of a run."""

    name: str
    """The mode and the name, such as "val/accuracy"."""
    last: float
    last_step: int
    best: float | None
    """The best score; None if the name does not say whether greater is better, or no score is finite."""
    best_step: int | None


def scores_of(curves: Sequence[Curve]) -> list[Score]:
    """Return the scores of the metrics of validations and tests, in the order of their first records."""
    return [_score(curve) for curve in curves if curve.mode in ("val", "test") and curve.name not in TIMES]


def _score(curve: Curve) -> Score:
    best, step = None, None
    with suppress(ValueError):  # of a name that says nothing
        greater = infer_rule(curve.name) == "greater"
        best, step = (curve.greatest, curve.greatest_step) if greater else (curve.least, curve.least_step)
    known = step is not None
    return Score(
        name=f"{curve.mode}/{curve.name}",
        last=curve.last,
        last_step=curve.last_step,
        best=best if known else None,
        best_step=step,
    )


def checkpoints_of(run: Path) -> list[Item]:
    """Return the durable checkpoints of a run, oldest first; those in another directory have its path.

    A directory that cannot be read has none.
    """
    found: list[Item] = []
    beat = None
    with suppress(OSError):
        beat = read_status(run)
    places = beat.status.checkpoints if beat is not None and beat.status is not None else []
    for place in dict.fromkeys([".", *places]):
        with suppress(OSError):
            items = Stock(run / place).inventory().checkpoints
            found += [
                item if place == "." else msgspec.structs.replace(item, name=f"{place}/{item.name}")
                for item in items
            ]
    return found
