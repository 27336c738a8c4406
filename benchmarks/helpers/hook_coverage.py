"""Check that each public hook has a row in `hook_cost`, or a reason for having none."""

from __future__ import annotations

import re
from collections.abc import Iterable

from benchmarks.helpers.hook_bench import Peer
from benchmarks.helpers.hook_numbers import POLICIES
from eventloop import hooks

WITHOUT_ROW = {
    "Hook": "the base of all hooks: nothing it has is subscribed",
    "LrUpdaterHook": "the base of the learning rate policies, each of which has a row",
    "MomentumUpdaterHook": "the base of the momentum policies, each of which has a row",
    "BaseAveragedModel": "the base of the averages of EMAHook, each of which has a row",
    "ExponentialMovingAverage": "the average of the row EMAHook",
}
"""Public classes of `eventloop.hooks` that are not timed by themselves, and why."""


def public_classes() -> set[str]:
    """The names of the classes that `eventloop.hooks` exports."""
    return {name for name in hooks.__all__ if isinstance(getattr(hooks, name), type)}


def complaints(rows: Iterable[str], peers: Iterable[Peer]) -> list[str]:
    """Return a sentence for each mistake in the rows of `hook_cost`.

    A mistake is a hook without a row and a reason, a reason for a hook that has a row or is not
    public, or a peer of a row that does not exist. A row is of every class that is named in its name;
    the rows of learning rate policies are named as in mmcv.
    """
    rows = [*rows]
    timed = {word for row in rows for word in re.findall(r"\w+", row)}
    timed |= {type(make()).__name__ for name, (make, _) in POLICIES.items() if f"{name} policy" in rows}
    public = public_classes()
    return [
        *(
            f"{name} has no row, and no reason in WITHOUT_ROW"
            for name in sorted(public - timed - WITHOUT_ROW.keys())
        ),
        *(f"{name} has a row, and a reason for having none" for name in sorted(timed & WITHOUT_ROW.keys())),
        *(
            f"{name} has a reason for having no row, and is no public hook"
            for name in sorted(WITHOUT_ROW.keys() - public)
        ),
        *(
            f"{peer.label} is a peer of {peer.row!r}, which is no row"
            for peer in peers
            if peer.row not in rows
        ),
    ]
