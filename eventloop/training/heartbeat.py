"""Write the status of a run into `heartbeat.json` once a second, for `eventloop watch`.

A thread of `RunOwnership` calls `StatusWriter.write`, which reads the trainer's counters; the training thread
does nothing. A run writes the file only if it owns its directory, and only on rank 0.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from eventloop.ownership.run_ownership import RunOwnership
from eventloop.ownership.status import RunState, RunStatus, write_status
from eventloop.state.exchange import decided_by_rank_0
from eventloop.temporary.process_identity import this_process
from eventloop.training.protocols import LoopTrainer
from eventloop.training.run_file import RunFile

logger = logging.getLogger("eventloop")

WINDOW_SECONDS = 10.0
"""The seconds over which the speed is averaged."""
WINDOW_CHANGES = 5
"""The least number of changes of the iteration over which the speed is averaged, however long they take."""
_STATES: dict[str, RunState] = {"val": "validating", "test": "testing", "predict": "predicting"}


def own_directories(trainer: LoopTrainer) -> RunOwnership:
    """Return the ownership of a trainer's directories, whose thread writes the status and `run.json`."""
    ownership = RunOwnership(
        lambda: [trainer.work_dir, *trainer.state.directories],
        trainer.request_stop,
        last_sequence=_last_sequence,
        decided=decided_by_rank_0,
        waits=not trainer.host,
    )
    ownership.each_second += [StatusWriter(trainer).write, RunFile(trainer).write]
    return ownership


def _last_sequence(directories: Sequence[Path]) -> int:
    from eventloop.checkpoint.directory import scan  # a run that saves nothing does not look for checkpoints

    return scan(*directories).last


class Speed:
    """The training iterations a second, computed from values of the iteration about a second apart."""

    def __init__(self) -> None:
        self._trained = 0.0  # seconds of training so far
        self._latest = 0.0  # the time of the last update
        # the seconds of training at which an iteration was first seen, and the iteration
        self._changes: deque[tuple[float, int]] = deque()

    def update(self, now: float, iteration: int, *, trains: bool) -> None:
        """Add a value of the iteration.

        Args:
            now: the time in seconds, by any clock.
            iteration: the number of completed iterations.
            trains: whether the run trains now; other time, as in a validation, does not count.
        """
        if trains and self._changes:
            self._trained += now - self._latest
        self._latest = now
        if self._changes:
            _, last_iteration = self._changes[-1]
            if iteration < last_iteration:  # a rollback
                self._changes.clear()
            if iteration <= last_iteration:
                return
        self._changes.append((self._trained, iteration))
        while len(self._changes) > WINDOW_CHANGES:
            second_began, _ = self._changes[1]  # the begin of the window without its first change
            if self._trained - second_began <= WINDOW_SECONDS:
                break
            self._changes.popleft()

    @property
    def value(self) -> float | None:
        """Return the iterations a second; None until the iteration has changed twice."""
        if len(self._changes) < 2:
            return None
        (began, first_iter), (ended, last_iter) = self._changes[0], self._changes[-1]
        return (last_iter - first_iter) / (ended - began) if ended > began else None


class StatusWriter:
    """Write the status of a trainer's run into `heartbeat.json`, at each call of `write`.

    The trainer's `RunOwnership` calls `write` on a thread of its own. If a write fails, as on a full disk,
    the file keeps the earlier status, and the next call tries again.
    """

    def __init__(self, trainer: LoopTrainer) -> None:
        self._trainer = trainer
        self._call: _Call | None = None

    def write(self) -> None:
        """Write the status now, unless another run has become the owner of the directory."""
        trainer = self._trainer
        if trainer.ownership.lost:
            return
        if self._call is None:
            self._call = _Call(trainer)
        status = self._call.status(self._state())
        if status.state == "ended":
            self._call = None
        try:
            write_status(trainer.work_dir, status)
        except OSError as error:
            logger.debug("%s has no heartbeat: %s", trainer.work_dir, error)

    def _state(self) -> RunState:
        """Return the present state of the run, such as "validating"."""
        ownership = self._trainer.ownership
        if ownership.ended:
            return "ended"
        if ownership.is_ending:
            return "ending"
        if self._trainer.commands.paused:
            return "paused"
        return _STATES.get(self._trainer.mode, "training")


class _Call:
    """The status of one call of `train`, `val` and so on, from its begin to its end."""

    def __init__(self, trainer: LoopTrainer) -> None:
        self._trainer, self._first_iter = trainer, trainer.iter
        self._begun = self._changed_at = time.time()
        self._latest: tuple[int, RunState] | None = None
        self._speed = Speed()
        self._host, self._process = socket.gethostname(), this_process()
        # computed once, because this takes as long as all other fields of a status
        self._checkpoints = [
            _relative_to_run(directory, trainer.work_dir) for directory in trainer.state.directories
        ]

    def status(self, state: RunState) -> RunStatus:
        """Return the status of the run, which is in this state now."""
        trainer, now = self._trainer, time.time()
        iteration = trainer.iter
        if self._latest != (iteration, state):
            self._latest, self._changed_at = (iteration, state), now
        self._speed.update(time.monotonic(), iteration, trains=state == "training")
        reason, error, signal = trainer.ownership.outcome or (None, None, None)
        return RunStatus(
            host=self._host,
            pid=self._process.pid,
            place=self._process.place,
            start=self._process.start,
            begun=self._begun,
            time=now,
            state=state,
            iter=iteration,
            first_iter=self._first_iter,
            epoch=trainer.epoch,
            max_iters=trainer.max_iters,
            max_epochs=trainer.max_epochs,
            speed=self._speed.value,
            moved=self._changed_at,
            ranks=trainer.world_size,
            checkpoints=self._checkpoints,
            reason=reason,
            error=error,
            signal=signal,
        )


def _relative_to_run(directory: Path, run: Path) -> str:
    """Return a directory's path relative to the run's directory if it is inside, else its absolute path.

    A relative path stays valid if the run's directory is moved.
    """
    directory, run = Path(os.path.abspath(directory)), Path(os.path.abspath(run))
    return directory.relative_to(run).as_posix() if directory.is_relative_to(run) else str(directory)
