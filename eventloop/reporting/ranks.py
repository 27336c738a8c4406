"""Read the cost records of all ranks of a run, and give advice on a rank that the others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median_low

from msgspec.structs import replace

from eventloop.costs.ranks import RankTimes, Straggler, common_windows, lasting_slow_rank, rank_times
from eventloop.costs.records import RunCosts, costs_path, read_costs

REMEDIES = {
    "data": "look at its loader: the disk, the worker processes, the cores that they share",
    "forward": "look at its device, at the cores that it shares, and at the size of its batches",
    "backward": "look at its device and at the cores that it shares",
    "optimizer": "look at its device and at the cores that it shares",
    "checkpoint": "only rank 0 saves: save less often (interval=), or less state, or use a faster disk",
    "background": 'look at its subscribers, above all at those with overflow="block"',
    "hooks": "look at what its handlers do that those of other ranks do not",
}
"""The remedies for a slow rank, by the phase in which it is slow."""
NAMES = 5
"""The largest number of ranks that are named in a note."""


def read_ranks(run: Path, first: RunCosts | None) -> tuple[list[RunCosts], list[str]]:
    """Return the cost records of a run's ranks, in rank order, and a list with a note on missing records.

    The second list is empty if every rank has a record. Both are empty if rank 0 has none, or is the only
    rank.

    Args:
        run: the run's directory.
        first: the record of rank 0; None if it has none.

    Raises:
        OSError, ValueError: a record is damaged, or has another format or a later version.
    """
    if first is None or first.world_size < 2:
        return [], []
    records, missing = [first], []
    for rank in range(1, first.world_size):
        costs = read_costs(run, rank) if costs_path(run, rank).is_file() else None
        if costs is None or costs.world_size != first.world_size:  # an earlier run has written the record
            missing.append(rank)
        else:
            records.append(costs)
    return records, [_missing_note(missing, first.world_size)] if missing else []


def _missing_note(missing: Sequence[int], world_size: int) -> str:
    """Return the sentence on ranks without a record."""
    names = ", ".join(str(rank) for rank in missing[:NAMES])
    more = f" and {len(missing) - NAMES} more" if len(missing) > NAMES else ""
    file = costs_path(Path(), missing[0])
    subject = f"records of ranks {names}{more} of {world_size} are"
    if len(missing) == 1:
        subject = f"record of rank {names} of {world_size} is"
    return (
        f"The {subject} missing, such as {file}: the rank was killed early, or wrote on another machine. No "
        "rank is called slow."
    )


def times_of(records: Sequence[RunCosts]) -> list[RankTimes]:
    """Return the mean times of an iteration for each rank that trained; [] if fewer than two ranks did."""
    trained = [costs for costs in records if costs.phases.iterations]
    if len(trained) < 2:
        return []
    times = rank_times([costs.phases for costs in trained])
    return [replace(rank_time, rank=costs.rank) for rank_time, costs in zip(times, trained, strict=True)]


def slow_rank_of(records: Sequence[RunCosts]) -> Straggler | None:
    """Return the rank that the others wait for; None without such a rank, or if a rank has no record."""
    if not records or len(records) < records[0].world_size:
        return None
    return lasting_slow_rank(common_windows([costs.trend for costs in records]))


def rank_advice(slow: Straggler, records: Sequence[RunCosts]) -> str:
    """Return a line of advice that names the slow rank, its slow phase, and a remedy."""
    remedy = REMEDIES[slow.phase]
    if slow.phase == "hooks" and (handler := _slow_handler(slow.rank, records)):
        remedy = f"most of it is in {handler}"
    return f"{slow.text}; {remedy}"


def _slow_handler(rank: int, records: Sequence[RunCosts]) -> str:
    """Return the handler with the largest excess on `rank` over the median rank; "" without an excess.

    Only handlers that are called in iterations are compared.
    """
    seconds_by_rank = [_handler_seconds(costs) for costs in records]
    excess = {
        name: seconds - median_low(other.get(name, 0.0) for other in seconds_by_rank)
        for name, seconds in seconds_by_rank[rank].items()
    }
    worst = max(excess, key=lambda name: excess[name], default="")
    return worst if worst and excess[worst] > 0 else ""


def _handler_seconds(costs: RunCosts) -> dict[str, float]:
    """Return the seconds per iteration of each handler by name, without handlers that run other phases."""
    seconds: dict[str, float] = {}
    iterations = max(1, costs.phases.iterations)
    for handler in costs.handlers:
        if handler.in_iteration and not handler.includes:
            seconds[handler.name] = seconds.get(handler.name, 0.0) + handler.seconds / iterations
    return seconds
