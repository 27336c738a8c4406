"""Find the points of a run's curves that have changed since they were last sent to the live page.

`WatchedRun` keeps the curves that it has sent last, and sends these points.
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
"""The scalars whose charts come after all others on the page."""


class CurveChange(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the points of a curve from the index `start` on; the page keeps its points before that index."""

    name: str
    mode: str
    later: bool
    """Whether its chart comes after those of other scalars."""
    last: str
    """The value of the last record, as text, because JSON has no NaN."""
    last_step: int
    start: int
    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


class CurveChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the changes of a run's curves."""

    all: bool
    """Whether `curves` has all curves of the run, so that the page removes others."""
    curves: list[CurveChange]


Key = tuple[str, str]


def key_of(curve: CurveView) -> Key:
    """Return the mode and name of a curve, which identify it within its run."""
    return curve.mode, curve.name


def changes(before: Sequence[CurveView], now: Sequence[CurveView]) -> CurveChanges | None:
    """Return the changes from the curves `before` to the curves `now`; None without changes."""
    sent = {key_of(curve): curve for curve in before}
    if not sent.keys() <= {key_of(curve) for curve in now}:  # a curve is gone: the run has begun again
        return whole(now)
    changed = []
    for curve in now:
        former = sent.get(key_of(curve))
        if former is None:
            changed.append(_change(curve, 0))
        elif former is not curve and not _same(former, curve):
            changed.append(_change(curve, _first_changed(former, curve)))
    return CurveChanges(all=False, curves=changed) if changed else None


def whole(curves: Sequence[CurveView]) -> CurveChanges:
    """Return all curves with all their points, for a page that has none."""
    return CurveChanges(all=True, curves=[_change(curve, 0) for curve in curves])


def _extent(curve: CurveView) -> tuple[int, int, int, str]:
    """Return numbers of a curve that nearly every new record changes, for a fast comparison."""
    return curve.count, curve.last_step, len(curve.steps), repr(curve.last)  # as text: NaN != NaN


def _same(before: CurveView, now: CurveView) -> bool:
    """Return whether two curves have the same points."""
    return _extent(before) == _extent(now) and before.steps == now.steps and before.mean == now.mean


def _first_changed(before: CurveView, now: CurveView) -> int:
    """Return the index of the first point that differs."""
    if bool(before.low) != bool(now.low):  # `low` is empty until points are merged for the first time
        return 0
    # nearly always only the last point that both have differs, because records were added to it
    last = max(0, min(len(before.steps), len(now.steps)) - 1)
    if before.steps[:last] == now.steps[:last] and before.mean[:last] == now.mean[:last]:
        return last
    pairs = zip(before.steps, now.steps, before.mean, now.mean, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] and pair[2] == pair[3], pairs))


def _change(curve: CurveView, start: int) -> CurveChange:
    """Return a curve's points from `start` on, with names that are safe as HTML."""
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
    """Round to seven digits: more than a chart shows, and half as long in JSON."""
    return [float(f"{value:.7g}") for value in values]
