"""Read the cost records of all ranks of a run, and advise on a rank that the others wait for."""

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
"""The largest number of ranks that a note names."""


def read_ranks(run: Path, first: RunCosts | None) -> tuple[list[RunCosts], list[str]]:
    """Return the cost records of a run's ranks, in rank order, and a message on ranks without a record.

    The message is the only item of the second list, which is empty if every rank has a record.

    Args:
        run: the run's directory.
        first: the record of rank 0. Without one, or if its run had one rank, both lists are empty.

    Raises:
        OSError, ValueError: a record is torn, of another format, or of a later version.
    """
    if first is None or first.world_size < 2:
        return [], []
    found, missing = [first], []
    for rank in range(1, first.world_size):
        costs = read_costs(run, rank) if costs_path(run, rank).is_file() else None
        if costs is None or costs.world_size != first.world_size:  # a record of an earlier run
            missing.append(rank)
        else:
            found.append(costs)
    return found, [_missing_note(missing, first.world_size)] if missing else []


def _missing_note(missing: Sequence[int], world_size: int) -> str:
    names = ", ".join(str(rank) for rank in missing[:NAMES])
    more = f" and {len(missing) - NAMES} more" if len(missing) > NAMES else ""
    file = costs_path(Path(), missing[0])
    what = f"records of ranks {names}{more} of {world_size} are"
    if len(missing) == 1:
        what = f"record of rank {names} of {world_size} is"
    return (
        f"The {what} missing, such as {file}: the rank was killed early, or wrote on another machine. No "
        "rank is called slow."
    )


def times_of(records: Sequence[RunCosts]) -> list[RankTimes]:
    """Return the mean times of an iteration for each rank that trained; [] if fewer than two did."""
    trained = [costs for costs in records if costs.phases.iterations]
    if len(trained) < 2:
        return []
    times = rank_times([costs.phases for costs in trained])
    return [replace(each, rank=costs.rank) for each, costs in zip(times, trained, strict=True)]


def slow_rank_of(records: Sequence[RunCosts]) -> Straggler | None:
    """Return the rank that the others wait for; None without one, or if a rank's record is missing."""
    if not records or len(records) < records[0].world_size:
        return None
    return lasting_slow_rank(common_windows([costs.trend for costs in records]))


def rank_advice(slow: Straggler, records: Sequence[RunCosts]) -> str:
    """Return a line that names the slow rank, its phase, and what to do."""
    todo = REMEDIES[slow.phase]
    if slow.phase == "hooks" and (handler := _slow_handler(slow.rank, records)):
        todo = f"most of it is in {handler}"
    return f"{slow.text}; {todo}"


def _slow_handler(rank: int, records: Sequence[RunCosts]) -> str:
    """Return the handler with the largest excess on `rank` over the median rank; "" if none takes longer.

    Only handlers of iterations count.
    """
    each = [_handler_seconds(costs) for costs in records]
    longer = {
        name: seconds - median_low(own.get(name, 0.0) for own in each) for name, seconds in each[rank].items()
    }
    worst = max(longer, key=lambda name: longer[name], default="")
    return worst if worst and longer[worst] > 0 else ""


def _handler_seconds(costs: RunCosts) -> dict[str, float]:
    """Return the seconds an iteration of each handler by name, except handlers that run other phases."""
    found: dict[str, float] = {}
    iterations = max(1, costs.phases.iterations)
    for handler in costs.handlers:
        if handler.in_iteration and not handler.includes:
            found[handler.name] = found.get(handler.name, 0.0) + handler.seconds / iterations
    return found
