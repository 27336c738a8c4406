"""Find the rank that the other ranks of a training wait for, from the phases of all ranks.

Ranks that exchange gradients have iterations of equal length, and the slow rank waits least. During a run
the package `stops` uses this module, and all ranks compute the same result. Afterwards the report and
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
"""The phases of an iteration, from the least to the most likely one to contain a wait for other ranks.

DistributedDataParallel waits in backward; FSDP, synchronized BatchNorm and hand-written loops wait in
forward. Ranks whose model has no collectives wait at the end of an iteration, which is the phase "ranks".
"""
NAMED = tuple(phase for phase in ORDER if phase not in ("ranks", "unaccounted"))
"""The phases that can be named as the reason why a rank is slow."""
LEAST_SECONDS = 2e-3
"""The seconds of an iteration that a rank must take longer than the median rank to count as slow.

Processes that share cores vary by 1 to 2 ms.
"""
LEAST_SHARE = 0.12
"""The part of an iteration, 0..1, that a rank must take longer than the median rank to count as slow."""
WINDOW = 4
"""The number of iterations in a window, over which the times of the ranks are compared."""
LATEST, ENOUGH = 10, 8
"""The number of latest windows, and in how many of them a rank must be slow to be reported.

A single window is no evidence, because any machine is busy at times.
"""
WORTH_SHARE = 0.02
"""The part of the time of all iterations, 0..1, that a slow rank must cost to be named in a report."""
Window = Sequence[Phases]
"""The phases of the same iterations on each rank, rank 0 first."""


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of a mean iteration on one rank, split into its own work and its waits for other ranks."""

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
    """The seconds of an iteration by which the sum of the rank's phases exceeds that of the median rank."""
    step: float
    """The seconds of an iteration on the rank with the longest iterations."""
    world_size: int

    @property
    def where(self) -> str:
        """Return the phase as reports name it, such as "data" or "waiting for a checkpoint"."""
        return WAITING.get(self.phase, self.phase)

    @property
    def text(self) -> str:
        """Return a sentence that names the rank, its phase and the times."""
        if self.world_size == 2:
            others, wait = f"rank {1 - self.rank}", "which waits"
        else:
            others, wait = "the usual rank", "and all wait"
        seconds, longer, step = map(duration, (self.seconds, self.longer, self.step))
        return (
            f"rank {self.rank} is slow in {self.where}: {seconds} of an iteration of "
            f"{step}; it takes {longer} longer than {others}, {wait} for it"
        )


def rank_times(ranks: Window) -> list[RankTimes]:
    """Return the times of each rank, with the waits for other ranks taken out of its phases.

    A rank that reaches a phase before the last rank may wait in it. So the time by which it exceeds the rank
    that is fastest in this phase counts as a wait, but no more than its lead over the last rank at the begin
    of the phase. In `ORDER` a phase with waits comes after the phases that cause them.
    """
    begins = [0.0] * len(ranks)  # when each rank begins the phase, in seconds of a mean iteration
    own: list[dict[str, float]] = [{} for _ in ranks]
    waited = [0.0] * len(ranks)
    for phase in ORDER:
        seconds_of = attrgetter(phase)
        durations = [seconds_of(phases) / (phases.iterations or 1) for phases in ranks]
        fastest, last_begin = min(durations), max(begins)
        waits = [
            min(seconds - fastest, last_begin - begin)
            for seconds, begin in zip(durations, begins, strict=True)
        ]
        if phase == "ranks":  # this phase is nothing but waits for other ranks
            waits = durations
        for rank, seconds in enumerate(durations):
            own[rank][phase] = seconds - waits[rank]
            waited[rank] += waits[rank]
            begins[rank] += seconds
    named = [phase for phase in phase_names(*ranks) if phase != "ranks"]
    return [
        RankTimes(rank=rank, own={phase: own[rank][phase] for phase in named}, waited=waited[rank])
        for rank in range(len(ranks))
    ]


def slow_rank(ranks: Window) -> Straggler | None:
    """Return the slow rank of a window, or None if no rank takes clearly longer than the median rank.

    The limits are `LEAST_SECONDS` and `LEAST_SHARE`.
    """
    if len(ranks) < 2 or not all(phases.iterations for phases in ranks):
        return None
    times = rank_times(ranks)
    names = [phase for phase in NAMED if phase in times[0].own]
    totals = [sum(rank_time.own[phase] for phase in names) for rank_time in times]
    rank, longer = max(enumerate(_beyond_median(totals)), key=lambda pair: pair[1])
    step = max(phases.wall / phases.iterations for phases in ranks)
    if longer < max(LEAST_SECONDS, LEAST_SHARE * step):
        return None
    excess = {name: _beyond_median([rank_time.own[name] for rank_time in times])[rank] for name in names}
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
    """Return by how much each rank's seconds exceed the median; of two ranks the faster is the median."""
    median = median_low(seconds)
    return [rank_seconds - median for rank_seconds in seconds]


def summed(windows: Sequence[Window]) -> list[Phases]:
    """Add up several windows, and return the summed phases of each rank, rank 0 first."""
    return [_sum(phases_of_rank) for phases_of_rank in zip(*windows, strict=True)]


def _sum(several: Iterable[Phases]) -> Phases:
    """Return the sum of several records of phases, as of different iterations."""
    parts = list(several)
    sums = {phase: sum(getattr(part, phase) for part in parts) for phase in phase_names(*parts)}
    return Phases(iterations=sum(part.iterations for part in parts), **sums)


class SlowRankWatch:
    """Receive the windows of a run one by one, and report a slow rank once for as long as it stays slow."""

    def __init__(self) -> None:
        self._latest: deque[Window] = deque(maxlen=LATEST)
        self._slow: deque[int | None] = deque(maxlen=LATEST)  # the slow rank of each window
        self._reported: set[tuple[int, str]] = set()  # the ranks that were reported, with their phases

    def add(self, window: Window) -> Straggler | None:
        """Add the next window, and return a slow rank that has not been reported yet, or None.

        A rank counts as slow if it is slow in `ENOUGH` of the latest windows, and in their sum. It may be
        reported again after it was not slow in `ENOUGH` of them.
        """
        straggler = slow_rank(window)
        self._latest.append(window)
        self._slow.append(None if straggler is None else straggler.rank)
        self._reported = {
            (rank, phase) for rank, phase in self._reported if self._slow.count(rank) > LATEST - ENOUGH
        }
        if (slow := _mostly_slow(self._slow)) is None:
            return None
        lasting = slow_rank(summed([*self._latest]))
        if lasting is None or lasting.rank != slow or (slow, lasting.phase) in self._reported:
            return None
        self._reported.add((slow, lasting.phase))
        return lasting


def _mostly_slow(slow_ranks: Iterable[int | None]) -> int | None:
    """Return the rank that is slow in at least `ENOUGH` windows, or None.

    Args:
        slow_ranks: the slow rank of each of the `LATEST` windows, None for a window without one.
    """
    (rank, count), *_ = Counter(slow_ranks).most_common(1)
    return rank if count >= ENOUGH else None


def lasting_slow_rank(windows: Sequence[Window]) -> Straggler | None:
    """Return the slow rank that cost the run the most time; None if the cost is below `WORTH_SHARE`.

    Args:
        windows: all windows of the run. The cost of a rank is computed from the stretches of `LATEST` windows
            in which it was slow in at least `ENOUGH` windows.
    """
    indices_of_rank = _slow_stretches(windows)
    seconds_of_run = sum(max(phases.wall for phases in window) for window in windows)
    worst, most_seconds = None, WORTH_SHARE * seconds_of_run
    for indices in indices_of_rank.values():
        phases_of_ranks = summed([windows[index] for index in sorted(indices)])
        straggler = slow_rank(phases_of_ranks)
        if straggler is None:
            continue
        lost_seconds = straggler.longer * phases_of_ranks[0].iterations
        if lost_seconds >= most_seconds:
            worst, most_seconds = straggler, lost_seconds
    return worst


def _slow_stretches(windows: Sequence[Window]) -> dict[int, set[int]]:
    """Return the indices of the windows in the stretches in which a rank was mostly slow, by rank."""
    stragglers = [slow_rank(window) for window in windows]
    slow_ranks = [None if straggler is None else straggler.rank for straggler in stragglers]
    indices_of_rank: dict[int, set[int]] = {}
    for end in range(1, len(slow_ranks) + 1):
        begin = max(0, end - LATEST)
        if (rank := _mostly_slow(slow_ranks[begin:end])) is not None:
            indices_of_rank.setdefault(rank, set()).update(range(begin, end))
    return indices_of_rank


def common_windows(trends: Sequence[Sequence[TrendPoint]]) -> list[Window]:
    """Return windows of the same iterations on all ranks, each of at least `WINDOW` iterations.

    Args:
        trends: the trend of each rank, whose points may begin at different iterations.
    """
    if not trends or not all(trends):
        return []
    begins = [{*(point.first_iter for point in trend), _end(trend)} for trend in trends]
    bounds: list[int] = []
    for iteration in sorted(set.intersection(*begins)):
        if not bounds or iteration - bounds[-1] >= WINDOW:
            bounds.append(iteration)
    return list(zip(*(_split(trend, bounds) for trend in trends), strict=True))


def _end(trend: Sequence[TrendPoint]) -> int:
    """Return the index of the iteration after the last point."""
    return trend[-1].first_iter + trend[-1].phases.iterations


def _split(trend: Sequence[TrendPoint], bounds: Sequence[int]) -> list[Phases]:
    """Return the summed phases of the points between each two successive bounds.

    Args:
        bounds: indices of iterations, at each of which a point begins or the last point ends.
    """
    parts: list[list[Phases]] = [[] for _ in bounds[1:]]
    for point in trend:
        part = bisect_right(bounds, point.first_iter) - 1
        if 0 <= part < len(parts):
            parts[part].append(point.phases)
    return [_sum(phases) for phases in parts]
