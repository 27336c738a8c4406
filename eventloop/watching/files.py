"""Read the costs and the checkpoints of a run again when their files have changed.

`RunReader` owns a `CostsFiles` and a `CheckpointList`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eventloop.checkpoint.directory import SUFFIXES
from eventloop.checkpoint.listing import Item, Stock
from eventloop.costs.ranks import RankTimes, Straggler
from eventloop.costs.records import FILE, RunCosts, SubscriberCost, phase_names, read_costs
from eventloop.reporting.ranks import read_ranks, slow_rank_of, times_of
from eventloop.reporting.report import advice_on_ranks
from eventloop.reporting.run_tables import called_handlers, with_includes
from eventloop.watching.view import CheckpointView, HandlerView, PhaseView, QueueView

HANDLERS = 20
"""The largest number of handlers in a view."""


class CostsFound(NamedTuple):
    """What the cost records of all ranks say.

    Attributes:
        costs: the record of rank 0; None without one.
        time: when it was written, by the clock of its disk.
        rank_times: the times of an iteration on each rank; [] for one rank.
        slow_rank: the rank that the others wait for.
        advice: sentences on what takes the time.
    """

    costs: RunCosts | None = None
    time: float | None = None
    rank_times: Sequence[RankTimes] = ()
    slow_rank: Straggler | None = None
    advice: Sequence[str] = ()


class CostsFiles:
    """The files `costs.json`, `costs.rank1.json` and so on of a run, read when rank 0's has changed."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._seen: tuple[int, int] | None = None
        self._found = CostsFound()

    def read(self) -> CostsFound:
        """Return what the files say.

        Raises:
            OSError, ValueError: a file cannot be read, is damaged, or of a later version.
        """
        try:
            stat = os.stat(self._run / FILE)
        except OSError:
            self._seen, self._found = None, CostsFound()
            return self._found
        if (seen := (stat.st_ino, stat.st_mtime_ns)) != self._seen:
            costs = read_costs(self._run)
            records, _ = read_ranks(self._run, costs)
            slow = slow_rank_of(records)
            advice = advice_on_ranks(costs, records, slow)
            self._found = CostsFound(costs, stat.st_mtime, times_of(records), slow, advice)
            self._seen = seen
        return self._found


def phase_views(costs: RunCosts) -> list[PhaseView]:
    """Return the phases of a mean iteration; [] if none has ended."""
    phases = costs.phases
    if not (phases.iterations and phases.wall):
        return []
    return [
        PhaseView(name=name, seconds=seconds / phases.iterations, share=seconds / phases.wall)
        for name in phase_names(phases)
        for seconds in (getattr(phases, name),)
    ]


def handler_views(costs: RunCosts) -> list[HandlerView]:
    """Return the most expensive handlers of an iteration; [] if none has ended."""
    phases = costs.phases
    if not (phases.iterations and phases.wall):
        return []
    return [
        HandlerView(
            name=with_includes(handler),
            event=handler.event,
            seconds=handler.seconds / phases.iterations,
            share=handler.share,
            p99=handler.times.p99 if handler.times.samples else None,
            budget=handler.budget,
            over_budget=handler.over_budget,
        )
        for handler in called_handlers(costs, inside=True)[:HANDLERS]
    ]


def queue_view(subscriber: SubscriberCost) -> QueueView:
    """Return the queue of a background subscriber."""
    return QueueView(
        name=subscriber.name,
        event=subscriber.event,
        queued=subscriber.queued,
        capacity=subscriber.capacity,
        peak=subscriber.peak_queued,
        delivered=subscriber.delivered,
        dropped=subscriber.dropped,
        failed=subscriber.failed,
        error=subscriber.error,
    )


class CheckpointsFound(NamedTuple):
    """The checkpoints of all directories of a run.

    Attributes:
        checkpoints: the durable ones, oldest first; those of a directory are together.
        saving: the names of temporary paths of running saves.
        damaged: a sentence for each checkpoint that is damaged.
    """

    checkpoints: list[CheckpointView]
    saving: list[str]
    damaged: list[str]


class CheckpointList:
    """The checkpoints in the directories of a run, listed when an entry of a directory has changed.

    Args:
        run: the run's directory.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._seen: object = None
        self._found = CheckpointsFound([], [], [])

    def read(self, places: Sequence[str]) -> CheckpointsFound:
        """Return the checkpoints of directories, whose paths are absolute, or relative to the run's.

        A directory that does not exist, or that may not be read, has no checkpoints.
        """
        directories = {place: self._run / place for place in places}
        seen = [_entries(directory) for directory in directories.values()]
        if seen != self._seen:
            found = CheckpointsFound([], [], [])
            for place, directory in directories.items():
                _list(place, directory, found)
            self._found, self._seen = found, seen
        return self._found


def _entries(directory: Path) -> frozenset[tuple[str, int]]:
    """Return the names and inodes of what may be a checkpoint, or the temporary path of one."""
    try:
        with os.scandir(directory) as entries:
            return frozenset(
                (entry.name, entry.inode())
                for entry in entries
                if entry.name.endswith(SUFFIXES) or entry.is_dir(follow_symlinks=False)
            )
    except OSError:
        return frozenset()


def _list(place: str, directory: Path, found: CheckpointsFound) -> None:
    try:
        inventory = Stock(directory).inventory()
    except OSError:
        return
    found.checkpoints.extend(_checkpoint(place, item) for item in inventory.checkpoints)
    found.saving.extend(left.name for left in inventory.leftovers if left.alive)
    found.damaged.extend(inventory.damaged)


def _checkpoint(place: str, item: Item) -> CheckpointView:
    return CheckpointView(
        name=item.name,
        directory=place,
        iter=item.iter,
        epoch=item.epoch,
        bytes=item.bytes,
        time=item.time,
        newest=item.newest,
        best=item.best_now,
        metrics=item.metrics,
        whole=item.whole is not False,
        abandoned=item.abandoned,
    )
