"""Find the rank that the other ranks of a training wait for, from the phases of all ranks.

Ranks that exchange gradients have iterations of equal length, and the slow rank waits least. During a run
`stops` uses this module, where all ranks compute the same result; afterwards the report and
`eventloop trace --ranks` use it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from operator import attrgetter
from statistics import median_low

import msgspec

from eventloop.costs.records import WAITING, Phases, TrendPoint, phase_names
from eventloop.util.formatting import duration

ORDER = (
    "data",
    "checkpoint",
    "background",
    "hooks",
    "optimizer",
    "forward",
    "backward",
    "ranks",
    "unaccounted",
)
"""The phases of an iteration, ordered by how likely they contain a wait for other ranks, least first.

DistributedDataParallel waits in backward; FSDP, synchronized BatchNorm and hand-written loops in forward.
Ranks whose model has no collectives wait at the end of an iteration, which is the phase "ranks".
"""
NAMED = tuple(phase for phase in ORDER if phase not in ("ranks", "unaccounted"))
"""The phases that a rank can be slow in, also by its own waits for a checkpoint or the background."""
LEAST_SECONDS = 2e-3
"""The least time per iteration, in seconds, by which a slow rank exceeds the median rank.

Processes that share cores vary by 1 to 2 ms.
"""
LEAST_SHARE = 0.12
"""The least part of an iteration by which a slow rank exceeds the median rank."""
WINDOW = 4
"""The number of iterations in a window, over which the times of the ranks are compared."""
LATEST, ENOUGH = 10, 8
"""A rank is slow if it is the slow one in 8 of the last 10 windows.

A single window is no evidence, because any machine is busy at times.
"""
WORTH_SHARE = 0.02
"""The part of the time of all iterations that a slow rank must cost to get a line in a report."""
Window = Sequence[Phases]
"""The phases of the same iterations on each rank, rank 0 first."""


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of a mean iteration on one rank, split into its own work and waits for other ranks."""

    rank: int
    own: dict[str, float]
    """The seconds of each phase, without waits for other ranks."""
    waited: float
    """The seconds of waits for other ranks."""


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that the other ranks wait for, with the phase that causes it."""

    rank: int
    phase: str
    """The phase with the largest excess over the median rank."""
    seconds: float
    """The seconds of this phase in an iteration, without waits."""
    longer: float
    """The seconds an iteration by which all phases of the rank exceed those of the median rank."""
    step: float
    """The seconds of an iteration."""
    world_size: int

    @property
    def where(self) -> str:
        """Return the phase as reports name it, such as "data" or "waiting for a checkpoint"."""
        return WAITING.get(self.phase, self.phase)

    @property
    def text(self) -> str:
        """Return a sentence that names the rank, its phase and the times."""
        two = self.world_size == 2
        others, wait = (f"rank {1 - self.rank}", "which waits") if two else ("the usual rank", "and all wait")
        taken, longer, step = map(duration, (self.seconds, self.longer, self.step))
        return (
            f"rank {self.rank} is slow in {self.where}: {taken} of an iteration of "
            f"{step}; it takes {longer} longer than {others}, {wait} for it"
        )


def rank_times(ranks: Window) -> list[RankTimes]:
    """Return the times of each rank, with the waits for other ranks taken out of its phases.

    Excess time of a rank in a phase, compared with the fastest rank, counts as a wait up to the lead that the
    rank had over the last rank before this phase. `ORDER` puts phases with waits after the phases that cause
    them.
    """
    arrived = [0.0] * len(ranks)
    own: list[dict[str, float]] = [{} for _ in ranks]
    waited = [0.0] * len(ranks)
    for phase in ORDER:
        seconds_of = attrgetter(phase)
        taken = [seconds_of(phases) / (phases.iterations or 1) for phases in ranks]
        least, last = min(taken), max(arrived)
        waits = [min(seconds - least, last - at) for seconds, at in zip(taken, arrived, strict=True)]
        if phase == "ranks":
            waits = taken
        for rank, seconds in enumerate(taken):
            own[rank][phase] = seconds - waits[rank]
            waited[rank] += waits[rank]
            arrived[rank] += seconds
    named = [phase for phase in phase_names(*ranks) if phase != "ranks"]
    return [
        RankTimes(rank=rank, own={phase: own[rank][phase] for phase in named}, waited=waited[rank])
        for rank in range(len(ranks))
    ]


def slow_rank(ranks: Window) -> Straggler | None:
    """Return the slow rank of a window, or None if no rank takes clearly longer than the median rank."""
    if len(ranks) < 2 or not all(phases.iterations for phases in ranks):
        return None
    times = rank_times(ranks)
    named = [phase for phase in NAMED if phase in times[0].own]
    totals = [sum(each.own[phase] for phase in named) for each in times]
    rank, longer = max(enumerate(_beyond_median(totals)), key=lambda pair: pair[1])
    step = max(phases.wall / phases.iterations for phases in ranks)
    if longer < max(LEAST_SECONDS, LEAST_SHARE * step):
        return None
    excess = {name: _beyond_median([each.own[name] for each in times])[rank] for name in named}
    phase = max(excess, key=lambda name: excess[name])
    return Straggler(
        rank=rank,
        phase=phase,
        seconds=times[rank].own[phase],
        longer=longer,
        step=step,
        world_size=len(ranks),
    )


def _beyond_median(seconds: Sequence[float]) -> list[float]:
    usual = median_low(seconds)  # of two ranks the faster one
    return [each - usual for each in seconds]


def summed(windows: Sequence[Window]) -> list[Phases]:
    """Add up several windows, and return the summed phases of each rank, rank 0 first."""
    return [_sum(own) for own in zip(*windows, strict=True)]


def _sum(several: Iterable[Phases]) -> Phases:
    parts = list(several)
    sums = {phase: sum(getattr(each, phase) for each in parts) for phase in phase_names(*parts)}
    return Phases(iterations=sum(each.iterations for each in parts), **sums)


class SlowRankWatch:
    """Judge the windows of a run as they come, and report a slow rank once for as long as it stays slow."""

    def __init__(self) -> None:
        self._latest: deque[Window] = deque(maxlen=LATEST)
        self._slow: deque[int | None] = deque(maxlen=LATEST)  # the slow rank of each window
        self._reported: set[tuple[int, str]] = set()

    def add(self, window: Window) -> Straggler | None:
        """Add the next window, and return a slow rank that has not been reported yet, or None."""
        found = slow_rank(window)
        self._latest.append(window)
        self._slow.append(None if found is None else found.rank)
        self._reported = {each for each in self._reported if self._slow.count(each[0]) > LATEST - ENOUGH}
        if (rank := _mostly(self._slow)) is None:
            return None
        lasting = slow_rank(summed([*self._latest]))
        if lasting is None or lasting.rank != rank or (rank, lasting.phase) in self._reported:
            return None
        self._reported.add((rank, lasting.phase))
        return lasting


def _mostly(slow: Iterable[int | None]) -> int | None:
    """Return the rank that is slow in enough of the latest windows, or None."""
    (rank, count), *_ = Counter(slow).most_common(1)
    return rank if count >= ENOUGH else None


def lasting_slow_rank(windows: Sequence[Window]) -> Straggler | None:
    """Return the rank that cost the run the most time while it was slow in most windows.

    None if no rank was slow in most windows of any stretch, or if the cost is below `WORTH_SHARE`.
    """
    each = [None if (found := slow_rank(window)) is None else found.rank for window in windows]
    stretches: dict[int, set[int]] = {}  # indices of windows
    for end in range(1, len(each) + 1):
        begin = max(0, end - LATEST)
        if (rank := _mostly(each[begin:end])) is not None:
            stretches.setdefault(rank, set()).update(range(begin, end))
    whole = sum(max(phases.wall for phases in window) for window in windows)
    worst, most = None, WORTH_SHARE * whole
    for stretch in stretches.values():
        ranks = summed([windows[i] for i in sorted(stretch)])
        found = slow_rank(ranks)
        if found is not None and (lost := found.longer * ranks[0].iterations) >= most:
            worst, most = found, lost
    return worst


def common_windows(trends: Sequence[Sequence[TrendPoint]]) -> list[Window]:
    """Split the trends of all ranks into windows of common iterations; the trends may differ in length."""
    ends = [{*(point.first_iter for point in own), _end(own)} for own in trends if own]
    if len(ends) < len(trends) or not ends:
        return []
    bounds: list[int] = []
    for at in sorted(set.intersection(*ends)):
        if not bounds or at - bounds[-1] >= WINDOW:
            bounds.append(at)
    return list(zip(*(_split(own, bounds) for own in trends), strict=True))


def _end(trend: Sequence[TrendPoint]) -> int:
    return trend[-1].first_iter + trend[-1].phases.iterations


def _split(trend: Sequence[TrendPoint], bounds: Sequence[int]) -> list[Phases]:
    """Return the summed phases between successive bounds; each bound is the begin or the end of a point."""
    parts: list[list[Phases]] = [[] for _ in bounds[1:]]
    for point in trend:
        place = bisect_right(bounds, point.first_iter) - 1
        if 0 <= place < len(parts):
            parts[place].append(point.phases)
    return [_sum(part) for part in parts]
