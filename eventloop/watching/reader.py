"""Read the directory of a run into a `RunView`. Each read reads only the new part of the logs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from eventloop.checkpoint.commit import MANIFEST
from eventloop.checkpoint.directory import scan
from eventloop.costs.records import FILE as COSTS
from eventloop.costs.records import RunCosts
from eventloop.description.record import read_record
from eventloop.eventlog.format import FILE_NAME as EVENTS
from eventloop.eventlog.jsonl import FILE_NAME as ROWS
from eventloop.ownership.owner import read_owner, records_in
from eventloop.ownership.status import FILE as HEARTBEAT
from eventloop.ownership.status import Outcome, RunStatus, read_status
from eventloop.util.checks import at_least, check_seconds
from eventloop.watching.curves import Choice
from eventloop.watching.files import (
    CheckpointList,
    CostsFiles,
    CostsFound,
    handler_views,
    phase_views,
    queue_view,
)
from eventloop.watching.liveness import HUNG_SECONDS, Age, Verdict, judge
from eventloop.watching.logged import Logged
from eventloop.watching.view import OVER, RunView

T = TypeVar("T")
FILES = (HEARTBEAT, ROWS, COSTS, EVENTS)
"""The files by which a run's directory is recognised; a living owner or a checkpoint suffices, too."""
SHOWN = 5
"""The largest number of file names in an error message."""


class RunReader:
    """Read a run that is under way, was killed, or has ended, on any machine that sees its directory.

        reader = RunReader("runs/digits", metrics=["loss", "val/*"])
        while not (view := reader.read()).over:
            print(view.state, view.iter, view.speed, view.latest)
            time.sleep(1)

    Nothing in the directory is changed: a hidden file, made to read the clock of the file system, is removed
    at once. A read reads the part of the logs that was added since the last one, and costs and checkpoints if
    their files have changed. One thread uses a reader.

    Args:
        run: the run's directory.
        metrics: the scalars that become curves, by name or pattern: "loss", "val/accuracy", "val/*", "*".
            None stands for the loss of the training and all scalars of validations and tests.
        points: the largest number of points of a curve; beyond that, neighbouring points are merged.
        curves: the largest number of curves, the first that are logged; None for no limit.
        hung_seconds: seconds without the end of an iteration after which the state of a training is "hung".
            The time is longer if 20 mean iterations are, and ten times as long for the first two iterations.

    Raises:
        TypeError, ValueError: the directory is not a run's, or an argument is invalid.
        OSError: the directory cannot be read.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        metrics: Sequence[str] | None = None,
        points: int = 400,
        curves: int | None = None,
        hung_seconds: float = HUNG_SECONDS,
    ) -> None:
        at_least("points", points, 2)
        if curves is not None:
            at_least("curves", curves, 0)
        check_seconds("hung_seconds", hung_seconds, zero=False)
        if isinstance(metrics, str):
            raise TypeError(
                f"metrics must be a sequence of names or patterns, got {metrics!r}: give [{metrics!r}]"
            )
        self._directory = Path(run)
        self._run = os.fsencode(run).decode(errors="backslashreplace")  # a file name need not be UTF-8
        _refuse_other(self._directory)
        self._hung_seconds = hung_seconds
        self._age = Age(self._directory)
        self._logged = Logged(self._directory, Choice(metrics), points, curves)
        self._costs = CostsFiles(self._directory)
        self._checkpoints = CheckpointList(self._directory)
        self._unreadable: list[str] = []

    def read(self) -> RunView:
        """Read the files of the run, and return its present state.

        A file that cannot be read is named in the `notes` of the result.
        """
        self._unreadable = []
        self._attempt(self._logged.read, None)
        costs_found = self._attempt(self._costs.read, CostsFound())
        beat = self._attempt(lambda: read_status(self._directory), None)
        status, age = (None, None) if beat is None else (beat.status, self._age.of(beat))
        verdict = self._judge(status, age or 0.0, costs_found.costs)
        if costs_found.costs is not None and costs_found.costs.complete and verdict.state not in OVER:
            # costs are complete only at the end of a call of `train`, so these are of an earlier call
            costs_found = CostsFound()
        return self._view(status, age, verdict, costs_found)

    def _attempt(self, read: Callable[[], T], otherwise: T) -> T:
        """Return the result of `read`, or `otherwise` after an error, which becomes a note of the view."""
        try:
            return read()
        except (OSError, ValueError) as error:
            self._unreadable.append(str(error))
            return otherwise

    def _judge(self, status: RunStatus | None, age: float, costs: RunCosts | None) -> Verdict:
        """Judge whether the run is alive, from its logs, its costs, its heartbeat and its owner's record."""
        if not self._directory.is_dir():
            return Verdict("unknown", f"{self._run} is gone")
        recorded = self._logged.outcome
        if recorded is None and costs is not None and costs.complete:
            reason, _, error = costs.outcome.partition(": ")
            recorded = Outcome(reason, error or None)
        owner = self._attempt(lambda: read_owner(self._directory), None)
        return judge(self._run, owner, status, age, recorded, self._hung_seconds)

    def _view(
        self, status: RunStatus | None, age: float | None, verdict: Verdict, costs_found: CostsFound
    ) -> RunView:
        """Return everything that the files have, with None for each value that no file has."""
        costs, outcome = costs_found.costs, verdict.outcome
        named = status.checkpoints if status is not None else ()
        checkpoints = self._checkpoints.read([".", *(path for path in named if path != ".")])
        return RunView(
            run=self._run,
            time=time.time(),
            state=verdict.state,
            sentence=verdict.sentence,
            host=None if status is None else status.host,
            pid=None if status is None else status.pid,
            begun=None if status is None else status.begun,
            age=age,
            still=verdict.still,
            reason=None if outcome is None else outcome.reason,
            error=None if outcome is None else outcome.error,
            signal=None if outcome is None else outcome.signal,
            iter=self._iter(status, costs),
            max_iters=None if status is None else status.max_iters,
            epoch=None if status is None else status.epoch,
            max_epochs=None if status is None else status.max_epochs,
            speed=None if status is None else status.speed,
            eta=_eta(status, verdict),
            latest=self._logged.latest(),
            curves=self._logged.curves(),
            lines=self._logged.lines(),
            health=self._logged.health(),
            costs_time=costs_found.time,
            phases=[] if costs is None else phase_views(costs),
            waits=[] if costs is None else costs.waits,
            handlers=[] if costs is None else handler_views(costs),
            queues=[] if costs is None else [*map(queue_view, costs.subscribers)],
            advice=[*costs_found.advice],
            ranks=_ranks(status, costs),
            rank_times=[*costs_found.rank_times],
            slow_rank=costs_found.slow_rank,
            checkpoints=checkpoints.checkpoints,
            saving=checkpoints.saving,
            damaged=checkpoints.damaged,
            record=self._attempt(lambda: read_record(self._directory), None),
            notes=[*self._notes(status), *self._unreadable],
        )

    def _iter(self, status: RunStatus | None, costs: RunCosts | None) -> int | None:
        if status is not None:
            return status.iter
        return None if costs is None else costs.first_iter + costs.phases.iterations

    def _notes(self, status: RunStatus | None) -> list[str]:
        """Return sentences on what cannot be read or shown."""
        notes = self._logged.notes()
        if status is None:
            notes.append(
                f"There is no {HEARTBEAT} here, or it cannot be read: progress and speed are unknown."
            )
        return notes


def _ranks(status: RunStatus | None, costs: RunCosts | None) -> int | None:
    if status is not None:
        return status.ranks
    return None if costs is None else costs.world_size


def _eta(status: RunStatus | None, verdict: Verdict) -> float | None:
    """Return the seconds left at the present speed; None if the run does not progress, or is endless."""
    if status is None or status.max_iters is None or not status.speed:
        return None
    if verdict.state not in ("training", "validating", "testing"):
        return None
    return max(0, status.max_iters - status.iter) / status.speed


def _refuse_other(run: Path) -> None:
    """Refuse a path that is not a run's directory; the error names the files there and paths to try.

    Raises:
        ValueError: the path is not a directory, or there is no file of a run in it.
        OSError: the directory cannot be read.
    """
    is_directory = run.is_dir()
    names = sorted(os.listdir(run)) if is_directory else []
    runs = [name for name in names if any((run / name / file).is_file() for file in FILES)]
    if is_directory and _is_run(run, names, has_runs=bool(runs)):
        return
    shown = [name for name in names if not name.startswith(".")]
    if runs and all(name in runs for name in shown if (run / name).is_dir()):
        raise ValueError(
            f"{run} is no run to watch: expected a run, got a directory of runs: watch {run / '*'}"
        )
    got = ", ".join(shown[:SHOWN]) or "nothing"
    if not is_directory:
        got = "a file" if run.is_file() else "no directory"
    hint = f": there are runs in {', '.join(runs[:SHOWN])}" if runs else ""
    if run.is_file() or MANIFEST in names:
        hint = f": is it {run.resolve().parent}?"
    raise ValueError(
        f"{run} is no run to watch: expected a directory with {' or '.join(FILES)}, a checkpoint, or a run "
        f"that has just begun, got {got}{hint}"
    )


def _is_run(run: Path, names: Sequence[str], *, has_runs: bool) -> bool:
    """Return whether a directory belongs to a run.

    If directories of runs are in it, a single checkpoint file or the record of a dead owner does not suffice.

    Args:
        run: the directory.
        names: the names of its entries.
        has_runs: whether directories of runs are in it.
    """
    if any(name in FILES for name in names):
        return True
    if records_in(run):
        owner = read_owner(run) if has_runs else None
        if not has_runs or (owner is not None and owner.lives is not False):
            return True
    if MANIFEST in names:
        return False
    checkpoints = scan(run)
    return bool(checkpoints.manifests if has_runs else checkpoints.paths)
