"""Sum up the waits of a run by cause, and advise on those that take 2 % of it.

`facts`, `summary` and `tables` show the sums, and `advice` has the lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from eventloop.costs.records import WAITING, WAITS, Cause, Place, RunCosts, WaitCost
from eventloop.util.formatting import duration, share

WORTH_SHARE = 0.02
"""The share of a run from which the waits of one cause get a line of advice."""
PLACES: dict[Place, str] = {
    "iterations": "in iterations",
    "evaluations": "in evaluations",
    "between": "between epochs",
    "end": "at the end",
}
"""The parts of a run as reports name them."""
_CHECKPOINT_CURES: dict[Place, str] = {
    "iterations": 'save less often (interval=), leave saves out while the disk is busy (when_busy="skip")',
    "evaluations": "validate less often (val_interval=), or keep the best of fewer metrics (save_best=)",
    "end": "the run ends when its last saves are on the disk: keep fewer of them due there (save_last=False)",
}
_CHECKPOINT_CURES["between"] = _CHECKPOINT_CURES["iterations"]
_LESS_STATE = "save less state (save_optimizer=False, if no run resumes from it), or use a faster disk"
_BACKGROUND_CURES: dict[Place, str] = {
    "end": 'send it fewer events (every=), let it write many at once (batch=True), or use offload="process"',
}
_NO_BLOCK = (
    'use overflow="spill" in place of "block", call bus.flush() less often, let it write many events at once '
    '(batch=True), or use offload="process"'
)
_EVEN_RANKS = (
    "give all ranks equal shares of the data and of the work between iterations, such as saves and logs"
)


class Advised(NamedTuple):
    """A line of advice on waits, and their seconds."""

    seconds: float
    text: str


class Waited(NamedTuple):
    """The waits of one cause: their seconds, in all and in each part of the run."""

    cause: Cause
    seconds: float
    places: dict[Place, float]

    def shares(self, whole: float) -> str:
        """Return the seconds, their share of the run and the parts of the run that have them.

        Args:
            whole: the seconds of the run; 0.0 if they are unknown.
        """
        parts = [
            f"{duration(self.places[place])} {name}" for place, name in PLACES.items() if place in self.places
        ]
        of = f", {share(self.seconds, whole)} of the run" if whole else ""
        return f"{duration(self.seconds)}{of}: {', '.join(parts)}"


def waits_by_cause(costs: RunCosts) -> list[Waited]:
    """Return the sums of the waits of each cause that has any."""
    found = []
    for cause in WAITS:
        own = [wait for wait in costs.waits if wait.cause == cause]
        if seconds := _sum(own):
            found.append(Waited(cause, seconds, _by_place(own)))
    return found


def seconds_waited(costs: RunCosts, cause: Cause | None = None, place: Place | None = None) -> float:
    """Return the seconds of the waits of a cause, in one part of the run; None stands for all."""
    return _sum(w for w in costs.waits if cause in (None, w.cause) and place in (None, w.place))


def longest_wait(costs: RunCosts, place: Place) -> float:
    """Return the seconds of the longest wait in one part of the run."""
    return max((wait.longest for wait in costs.waits if wait.place == place), default=0.0)


def wait_advice(costs: RunCosts) -> list[Advised]:
    """Return a line on the waits for checkpoints and one on those for the background, where they matter."""
    lines = []
    for waited in waits_by_cause(costs):
        if waited.cause == "ranks" or not _worth(waited.seconds, costs):
            continue
        place = max(waited.places, key=lambda each: waited.places[each])
        what = f"{WAITING[waited.cause]} took {waited.shares(_whole(costs))}"
        most = f"most of it for {_most(waited, costs)}"
        if waited.cause == "checkpoint":
            cure = f"{_CHECKPOINT_CURES[place]}, {_LESS_STATE}"
        else:
            cure = _BACKGROUND_CURES.get(place, _NO_BLOCK)
        lines.append(Advised(waited.seconds, f"{what}; {most}; {cure}"))
    return lines


def rank_wait_advice(records: Sequence[RunCosts]) -> list[Advised]:
    """Return at most one line, on the rank that waited longest for other ranks.

    Args:
        records: the costs of the ranks that are known; of several, the rank that waited least is named.
    """
    longest = max(records, key=lambda costs: seconds_waited(costs, "ranks"))
    seconds = seconds_waited(longest, "ranks")
    if not _worth(seconds, longest):
        return []
    (waited,) = (each for each in waits_by_cause(longest) if each.cause == "ranks")
    on = f"rank {longest.rank} " if len(records) > 1 else ""
    last = min(records, key=lambda costs: seconds_waited(costs, "ranks"))
    least = seconds_waited(last, "ranks")
    late = f"rank {last.rank} came last, and waited {duration(least)}; " if least < seconds / 2 else ""
    what = f"{WAITING['ranks']} took {on}{waited.shares(_whole(longest))}"
    return [Advised(seconds, f"{what}; most of it at {_most(waited, longest)}; {late}{_EVEN_RANKS}")]


def _most(waited: Waited, costs: RunCosts) -> str:
    """Return the name of what was waited for longest."""
    names: dict[str, float] = {}
    for wait in costs.waits:
        if wait.cause == waited.cause:
            names[wait.name] = names.get(wait.name, 0.0) + wait.seconds
    name = max(names, key=lambda each: names[each])
    return f"{name or 'others'} ({duration(names[name])})"


def _worth(seconds: float, costs: RunCosts) -> bool:
    return seconds > 0 and seconds >= WORTH_SHARE * _whole(costs)


def _whole(costs: RunCosts) -> float:
    return costs.seconds or costs.phases.wall


def _sum(waits: Iterable[WaitCost]) -> float:
    return sum(wait.seconds for wait in waits)


def _by_place(waits: Iterable[WaitCost]) -> dict[Place, float]:
    found: dict[Place, float] = {}
    for wait in waits:
        found[wait.place] = found.get(wait.place, 0.0) + wait.seconds
    return found
