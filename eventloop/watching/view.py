"""Define `RunView`, all that is shown of a run: the schema of `eventloop watch --json`.

Durations are in seconds, times are Unix times in seconds. None stands for unknown. In
JSON, NaN and infinities are null.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from eventloop.costs.ranks import RankTimes, Straggler
from eventloop.costs.records import WaitCost
from eventloop.description.record import RunRecord

VERSION = 1
"""The version of the schema; fields may be added without a new one."""

ViewState = Literal[
    "starting",
    "training",
    "validating",
    "testing",
    "predicting",
    "paused",
    "ending",
    "hung",
    "ended",
    "killed",
    "unknown",
]
"""What a run does.

"starting" lasts until the run's first sign of life, "ending" until everything is written. A run is "hung" if
its process lives, and no iteration has ended for long, or no sign of life has come. It has "ended" for a
`reason`. It was "killed" if its process is gone and has not recorded an end. It is "unknown" if neither an
end nor a process is recorded.
"""
OVER: frozenset[ViewState] = frozenset({"ended", "killed", "unknown"})
"""The states of a run from which nothing more will come, unless it is started again."""


class CurveView(msgspec.Struct, frozen=True, kw_only=True):
    """The course of one scalar, as a bounded number of points.

    A point is one record, or the mean, least and greatest value of neighbouring records. It is NaN if none of
    its values is finite.
    """

    name: str
    mode: str
    """The mode of the records: "train", "val" or "test"."""
    count: int
    """The number of records."""
    last: float
    """The value of the last record."""
    last_step: int
    """Completed training iterations at the last record."""
    steps: list[int]
    """Completed training iterations at the last record of each point."""
    mean: list[float]
    low: list[float]
    """The least value of each point; `low` and `high` are empty if each point is one record."""
    high: list[float]


class PhaseView(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of an iteration, as a mean over the iterations that `costs.json` has."""

    name: str
    """A phase in which the training thread works, such as "data" or "forward", or waits, as "checkpoint"."""
    seconds: float
    """Seconds an iteration."""
    share: float
    """The share of the iterations' wall time, 0 to 1."""


class HandlerView(msgspec.Struct, frozen=True, kw_only=True):
    """One synchronous handler that was called in iterations, as `costs.json` has it."""

    name: str
    """The handler's name, with the phases whose time its own includes, such as "backward"."""
    event: str
    seconds: float
    """Seconds an iteration."""
    share: float
    """The share of the iterations' wall time, 0 to 1."""
    p99: float | None
    """The 99th percentile of its calls in seconds; None if none was clocked."""
    budget: float | None
    """The limit of the p99 in seconds; None without one."""
    over_budget: bool


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """The queue of one background subscriber, as `costs.json` has it. All counts are of events."""

    name: str
    event: str
    """The names of its events, joined by ", ", or "*" for all."""
    queued: int
    """The backlog: events that wait."""
    capacity: int | None
    """The largest backlog in memory; further events are spilled, dropped or waited for. None if unknown."""
    peak: int
    """The largest backlog so far."""
    delivered: int
    dropped: int
    failed: int
    error: str
    """The last error; "" if there was none."""


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    """One durable checkpoint, or a single file that can be read as one."""

    name: str
    directory: str
    """The directory that holds it; relative to the run's directory if it is inside, "." for that itself."""
    iter: int | None
    """Completed training iterations; None for a single file."""
    epoch: int | None
    """Completed epochs; None for a single file."""
    bytes: int
    time: str
    """When it was saved, ISO 8601."""
    newest: bool
    """Whether `resume("auto")` would take it."""
    best: list[str]
    """The metrics for which it is the best one now."""
    metrics: dict[str, float | str]
    """The scores of the last validation before it; those that are not finite are strings, such as "nan"."""
    whole: bool
    """Whether its files have the sizes that its manifest records; their contents were not read."""
    abandoned: bool
    """Whether the run has gone back to an earlier checkpoint."""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a run that is worth a line."""

    event: str
    """The event's name, such as "checkpoint_saved"."""
    iter: int | None
    """The index of the iteration; None if the event has none."""
    time: float | None
    """When it was emitted; None if it was read from `metrics.jsonl`, which has no times."""
    text: str
    """A sentence for people."""
    bad: bool
    """Whether it reports ill health: a failure, a loss of events, a slow part, a loss that is not finite."""


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """All that is shown of one run, at one moment.

        view = RunReader("runs/digits").read()
        print(view.state, view.iter, view.max_iters, view.latest.get("train/loss"))

    `eventloop watch RUN --json` prints it, one line a change. Durations are in seconds, times are Unix times
    in seconds; None stands for unknown.
    """

    version: int = VERSION
    run: str
    """The run's directory, as it was given."""
    time: float
    """When the directory was read, by the reader's clock."""
    state: ViewState
    sentence: str
    """The state as a sentence for people: since when, on which host, why, and what to do."""

    # --- the process ---
    host: str | None
    """The machine on which the run is or was."""
    pid: int | None
    begun: float | None
    """When the present call of `train`, `val`, ... began."""
    age: float | None
    """Seconds since the last sign of life in `heartbeat.json`; None without that file."""
    still: float | None
    """Seconds since an iteration ended or the state changed."""
    reason: str | None
    """Why the run has ended: "completed", "error", or the reason of a stop; None before."""
    error: str | None
    signal: str | None
    """The name of the signal that ended the run, such as "SIGTERM"."""

    # --- progress ---
    iter: int | None
    """Completed training iterations."""
    max_iters: int | None
    epoch: int | None
    """Completed epochs."""
    max_epochs: int | None
    speed: float | None
    """Training iterations a second over the last seconds, without evaluations."""
    eta: float | None
    """Seconds of the iterations that are left at this speed, without evaluations."""

    # --- what was logged ---
    latest: dict[str, float]
    """The last value of each scalar by mode and name, such as "train/loss"."""
    curves: list[CurveView]
    """The chosen curves, in the order of their first records."""
    lines: list[Notice]
    """The last events that are worth a line, oldest first."""
    health: list[Notice]
    """The last events that report ill health, oldest first."""

    # --- costs.json, which a run writes after 2, 6, 14 s, then each 30 s, and at its end ---
    costs_time: float | None
    """When the run last wrote `costs.json`, by the clock of its disk; None if it has written none."""
    phases: list[PhaseView]
    waits: list[WaitCost]
    """The waits of the training thread, the longest sum first."""
    handlers: list[HandlerView]
    """The most expensive handlers of an iteration, the most expensive first."""
    queues: list[QueueView]
    advice: list[str]
    """At most three sentences: which parts take the time, and the remedies."""
    ranks: int | None
    """The number of processes that train together."""
    rank_times: list[RankTimes]
    """The mean times of an iteration on each rank, without waits for other ranks; [] for one rank."""
    slow_rank: Straggler | None
    """The rank that the others wait for."""

    # --- checkpoints ---
    checkpoints: list[CheckpointView]
    """The durable checkpoints, oldest first; the last one is durable and the newest."""
    saving: list[str]
    """The names of temporary paths of saves that are under way, so not durable yet."""
    damaged: list[str]
    """A sentence for each checkpoint that is damaged."""

    record: RunRecord | None
    """What the run was begun with, by its `run.json`: options, model, machine, versions and commit."""

    notes: list[str]
    """Sentences on what is not shown, and why."""

    @property
    def over(self) -> bool:
        """Return whether nothing more will come from this run, unless it is started again."""
        return self.state in OVER
