"""Read the costs and the checkpoints of a run, again whenever their files have changed.

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
    """Hold the costs of a run, from the cost records of all its ranks.

    Attributes:
        costs: the record of rank 0; None without such a record.
        time: the Unix time at which the record was written, by the clock of its disk.
        rank_times: the times of an iteration on each rank; [] for one rank.
        slow_rank: the rank that the other ranks wait for; None if there is no such rank.
        advice: sentences on the parts of an iteration that take the most time.
    """

    costs: RunCosts | None = None
    time: float | None = None
    rank_times: Sequence[RankTimes] = ()
    slow_rank: Straggler | None = None
    advice: Sequence[str] = ()


class CostsFiles:
    """Read the files `costs.json`, `costs.rank1.json` and so on of a run when `costs.json` has changed."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._last_read: tuple[int, int] | None = None  # inode and modification time of `costs.json`
        self._found = CostsFound()

    def read(self) -> CostsFound:
        """Return the costs that the files have; an empty `CostsFound` without `costs.json`.

        Raises:
            OSError, ValueError: a file cannot be read, is damaged, or has a later version.
        """
        try:
            stat = os.stat(self._run / FILE)
        except OSError:
            self._last_read, self._found = None, CostsFound()
            return self._found
        if (present := (stat.st_ino, stat.st_mtime_ns)) != self._last_read:
            costs = read_costs(self._run)
            records, _ = read_ranks(self._run, costs)
            slow = slow_rank_of(records)
            advice = advice_on_ranks(costs, records, slow)
            self._found = CostsFound(costs, stat.st_mtime, times_of(records), slow, advice)
            self._last_read = present
        return self._found


def phase_views(costs: RunCosts) -> list[PhaseView]:
    """Return the phases of a mean iteration; [] if no iteration has ended."""
    phases = costs.phases
    if not (phases.iterations and phases.wall):
        return []
    return [
        PhaseView(name=name, seconds=seconds / phases.iterations, share=seconds / phases.wall)
        for name in phase_names(phases)
        for seconds in (getattr(phases, name),)
    ]


def handler_views(costs: RunCosts) -> list[HandlerView]:
    """Return the most expensive handlers that are called in iterations; [] if no iteration has ended."""
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
    """Hold the checkpoints in all directories of a run.

    Attributes:
        checkpoints: the durable checkpoints of one directory after another, each oldest first.
        saving: the names of temporary paths of running saves.
        damaged: a sentence for each checkpoint that is damaged.
    """

    checkpoints: list[CheckpointView]
    saving: list[str]
    damaged: list[str]


class CheckpointList:
    """List the checkpoints of a run, again whenever the entries of its directories have changed.

    Args:
        run: the run's directory.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._listed: object = None  # the entries of the directories at the last listing
        self._found = CheckpointsFound([], [], [])

    def read(self, paths: Sequence[str]) -> CheckpointsFound:
        """Return the checkpoints in directories.

        A directory that does not exist, or that may not be read, has no checkpoints.

        Args:
            paths: the directories; a relative path is relative to the run's directory.
        """
        directories = {path: self._run / path for path in paths}
        present = [_entries(directory) for directory in directories.values()]
        if present != self._listed:
            found = CheckpointsFound([], [], [])
            for path, directory in directories.items():
                _list(path, directory, found)
            self._found, self._listed = found, present
        return self._found


def _entries(directory: Path) -> frozenset[tuple[str, int]]:
    """Return the names and inodes of entries that may be checkpoints, or temporary paths of saves."""
    try:
        with os.scandir(directory) as entries:
            return frozenset(
                (entry.name, entry.inode())
                for entry in entries
                if entry.name.endswith(SUFFIXES) or entry.is_dir(follow_symlinks=False)
            )
    except OSError:
        return frozenset()


def _list(path: str, directory: Path, found: CheckpointsFound) -> None:
    """Add the checkpoints of a directory to `found`.

    Args:
        path: the path of the directory as a `CheckpointView` shows it.
        directory: the same path from this process's working directory.
    """
    try:
        inventory = Stock(directory).inventory()
    except OSError:
        return
    found.checkpoints.extend(_checkpoint(path, item) for item in inventory.checkpoints)
    found.saving.extend(leftover.name for leftover in inventory.leftovers if leftover.alive)
    found.damaged.extend(inventory.damaged)


def _checkpoint(path: str, item: Item) -> CheckpointView:
    """Return an item of the listing as the pages and screens show it."""
    return CheckpointView(
        name=item.name,
        directory=path,
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
