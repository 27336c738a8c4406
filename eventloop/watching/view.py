"""Define `RunView`, the state of a run that readers show: the schema of `eventloop watch --json`.

Durations are in seconds, times are Unix times in seconds. None stands for unknown. In JSON, NaN and
infinities are null.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from eventloop.costs.ranks import RankTimes, Straggler
from eventloop.costs.records import WaitCost
from eventloop.description.record import RunRecord

VERSION = 1
"""The version of the schema; added fields do not change it."""

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
"""The states of a run.

"starting" lasts until the run's first heartbeat, "ending" until all files are written. A run is "hung" if its
process is alive, and no iteration has ended or no heartbeat was written for long. It has "ended" for a
`reason`. It was "killed" if its process is gone and has recorded no end. It is "unknown" if neither an end
nor a process is recorded.
"""
OVER: frozenset[ViewState] = frozenset({"ended", "killed", "unknown"})
"""The states in which a run writes nothing more, unless it is started again."""


class CurveView(msgspec.Struct, frozen=True, kw_only=True):
    """Describe one scalar over the steps of a run, as a bounded number of points.

    A point has the value of one record, or the mean, least and greatest value of neighbouring records. Its
    values are NaN if no record of the point is finite.
    """

    name: str
    mode: str
    """The mode of the records: "train", "val" or "test"."""
    count: int
    """The number of records."""
    last: float
    """The value of the last record."""
    last_step: int
    """The number of completed training iterations at the last record."""
    steps: list[int]
    """The number of completed training iterations at the last record of each point."""
    mean: list[float]
    low: list[float]
    """The least value of each point; `low` and `high` are empty if each point is one record."""
    high: list[float]


class PhaseView(msgspec.Struct, frozen=True, kw_only=True):
    """Describe one phase of an iteration, as a mean over the iterations that `costs.json` covers."""

    name: str
    """The name, such as "data" or "forward", or "checkpoint" for a wait of the training thread."""
    seconds: float
    """Seconds per iteration."""
    share: float
    """The share of the iterations' wall time, 0 to 1."""


class HandlerView(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the cost of one synchronous handler that is called in iterations, from `costs.json`."""

    name: str
    """The handler's name, followed by the phases, such as "backward", that its time includes."""
    event: str
    seconds: float
    """Seconds per iteration."""
    share: float
    """The share of the iterations' wall time, 0 to 1."""
    p99: float | None
    """The 99th percentile of the times of its calls in seconds; None if no call was measured."""
    budget: float | None
    """The limit for `p99` in seconds; None if the handler has none."""
    over_budget: bool


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the queue of one background subscriber, from `costs.json`. All counts are of events."""

    name: str
    event: str
    """The names of the events that it receives, joined by ", ", or "*" for all."""
    queued: int
    """How many events are in the queue."""
    capacity: int | None
    """How many events the queue holds in memory; further ones are spilled or dropped, or the emit waits.

    None if unknown.
    """
    peak: int
    """The largest number of events in the queue so far."""
    delivered: int
    dropped: int
    failed: int
    error: str
    """The last error; "" if there was none."""


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    """Describe one durable checkpoint, or a single file that can be read as a checkpoint."""

    name: str
    directory: str
    """The directory of the checkpoint: "." for the run's directory, relative to that if it is inside."""
    iter: int | None
    """Completed training iterations; None for a single file."""
    epoch: int | None
    """Completed epochs; None for a single file."""
    bytes: int
    time: str
    """When it was saved, ISO 8601."""
    newest: bool
    """Whether `resume("auto")` would resume from it."""
    best: list[str]
    """The names of the metrics for which it is now the best checkpoint."""
    metrics: dict[str, float | str]
    """The metrics of the last validation before the save; NaN and infinities are strings, such as "nan"."""
    whole: bool
    """Whether its files have the sizes that its manifest records; their contents were not read."""
    abandoned: bool
    """Whether the run has gone back to an earlier checkpoint."""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Describe one notable event of a run by a sentence."""

    event: str
    """The event's name, such as "checkpoint_saved"."""
    iter: int | None
    """The index of the iteration; None if the event has none."""
    time: float | None
    """The time at which it was emitted; None if it was read from `metrics.jsonl`, which has no times."""
    text: str
    """A sentence for people."""
    bad: bool
    """Whether it reports a problem, such as a failure, dropped events, a slow handler or a NaN loss."""


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the state of one run at the time of a read.

        view = RunReader("runs/digits").read()
        print(view.state, view.iter, view.max_iters, view.latest.get("train/loss"))

    `eventloop watch RUN --json` prints it as one line whenever it has changed. Durations are in seconds,
    times are Unix times in seconds; None stands for unknown.
    """

    version: int = VERSION
    run: str
    """The run's directory, as it was given."""
    time: float
    """The time of the read, by the reader's clock."""
    state: ViewState
    sentence: str
    """The state as a sentence for people, with the process, the reason, and what to do."""

    # --- the process ---
    host: str | None
    """The name of the machine on which the run is or was."""
    pid: int | None
    begun: float | None
    """The time at which the present call of `train`, `val` and so on began."""
    age: float | None
    """Seconds since `heartbeat.json` was last written; None without that file."""
    still: float | None
    """Seconds since an iteration ended or the state changed."""
    reason: str | None
    """Why the run has ended: "completed", "error", or the reason of a stop. None if it has not ended."""
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
    """Training iterations per second over the last seconds, without the time of evaluations."""
    eta: float | None
    """Seconds that the remaining iterations take at this speed, without the time of evaluations."""

    # --- what was logged ---
    latest: dict[str, float]
    """The last value of each scalar by mode and name, such as "train/loss"."""
    curves: list[CurveView]
    """The chosen curves, in the order of their first records."""
    lines: list[Notice]
    """The last notable events, oldest first."""
    health: list[Notice]
    """The last events that report a problem, oldest first."""

    # --- costs.json, which a run writes after 2, 6, 14 s, then each 30 s, and at its end ---
    costs_time: float | None
    """The time at which the run last wrote `costs.json`, by the clock of its disk; None without that file."""
    phases: list[PhaseView]
    waits: list[WaitCost]
    """The waits of the training thread, those with the longest total time first."""
    handlers: list[HandlerView]
    """The most expensive handlers that are called in iterations, the most expensive first."""
    queues: list[QueueView]
    advice: list[str]
    """At most three sentences on the parts that take the time, with remedies."""
    ranks: int | None
    """The number of processes that train together."""
    rank_times: list[RankTimes]
    """The mean times of an iteration on each rank, without waits for other ranks; [] for one rank."""
    slow_rank: Straggler | None
    """The rank that the others wait for."""

    # --- checkpoints ---
    checkpoints: list[CheckpointView]
    """The durable checkpoints, oldest first."""
    saving: list[str]
    """The names of the temporary paths of saves under way."""
    damaged: list[str]
    """A sentence for each checkpoint that is damaged."""

    record: RunRecord | None
    """The contents of `run.json`: options, model, machine, versions and commit. None without that file."""

    notes: list[str]
    """Sentences on parts that are missing here, with the reasons."""

    @property
    def over(self) -> bool:
        """True if the run writes nothing more, unless it is started again."""
        return self.state in OVER
