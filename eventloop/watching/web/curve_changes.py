"""Find what a page lacks of the curves of a run.

`WatchedRun` keeps the curves that it has sent last, and sends the points that are new or have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import msgspec

from eventloop.costs.step_clock import TIMES
from eventloop.util.formatting import value_text
from eventloop.util.surrogates import escaped
from eventloop.watching.view import CurveView

LATER = frozenset({*TIMES, "lr"})
"""The scalars whose charts come last."""


class CurveChange(msgspec.Struct, frozen=True, kw_only=True):
    """The points of a curve from the index `start` on; the page keeps those before."""

    name: str
    mode: str
    later: bool
    """Whether its chart comes after others."""
    last: str
    """The value of the last record, as text, because JSON has no NaN."""
    last_step: int
    start: int
    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


class CurveChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of all curves of a run."""

    all: bool
    """Whether these are all curves, and the page drops all others."""
    curves: list[CurveChange]


Key = tuple[str, str]


def key_of(curve: CurveView) -> Key:
    """Return what distinguishes a curve from the others of its run."""
    return curve.mode, curve.name


def changes(before: Sequence[CurveView], now: Sequence[CurveView]) -> CurveChanges | None:
    """Return what has changed; None for nothing."""
    former = {key_of(curve): curve for curve in before}
    if not former.keys() <= {key_of(curve) for curve in now}:  # a run has begun again
        return whole(now)
    changed = [
        _change(curve, _first_changed(known, curve) if known is not None else 0)
        for curve in now
        if (known := former.get(key_of(curve))) is not curve and (known is None or not _same(known, curve))
    ]
    return CurveChanges(all=False, curves=changed) if changed else None


def whole(curves: Sequence[CurveView]) -> CurveChanges:
    """Return all curves with all points."""
    return CurveChanges(all=True, curves=[_change(curve, 0) for curve in curves])


def _extent(curve: CurveView) -> tuple[int, int, int, str]:
    return curve.count, curve.last_step, len(curve.steps), repr(curve.last)  # NaN is not equal to itself


def _same(before: CurveView, now: CurveView) -> bool:
    return _extent(before) == _extent(now) and before.steps == now.steps and before.mean == now.mean


def _first_changed(before: CurveView, now: CurveView) -> int:
    """Return the index of the first point that differs; of merged points none may be left of those before."""
    if bool(before.low) != bool(now.low):
        return 0
    last = max(0, min(len(before.steps), len(now.steps)) - 1)  # records may have been added to the last point
    if before.steps[:last] == now.steps[:last] and before.mean[:last] == now.mean[:last]:
        return last
    pairs = zip(before.steps, now.steps, before.mean, now.mean, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] and pair[2] == pair[3], pairs))


def _change(curve: CurveView, start: int) -> CurveChange:
    return CurveChange(
        name=escaped(curve.name),
        mode=escaped(curve.mode),
        later=curve.name in LATER,
        last=value_text(curve.last),
        last_step=curve.last_step,
        start=start,
        steps=curve.steps[start:],
        mean=_short(curve.mean[start:]),
        low=_short(curve.low[start:]),
        high=_short(curve.high[start:]),
    )


def _short(values: Sequence[float]) -> list[float]:
    """Round to seven digits, which are more than a chart shows, and half as long in JSON."""
    return [float(f"{value:.7g}") for value in values]
