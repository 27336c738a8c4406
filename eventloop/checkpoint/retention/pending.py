"""Start the saves of a `CheckpointHook`, track the running ones, and report their results as events.

`CheckpointHook` uses it on the training thread; the saver writes in the background.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from eventloop.checkpoint.disk import SaveGivenUp
from eventloop.checkpoint.retention.retention import Retention
from eventloop.checkpoint.saving.mark import Mark
from eventloop.checkpoint.saving.overlapped_copy import SavingTrainer
from eventloop.checkpoint.saving.saver import AT_ONCE_SECONDS, Saver, SaveReplacedError
from eventloop.checkpoint.saving.saver_client import Job, Written
from eventloop.costs.waits import waiting
from eventloop.events import CheckpointFailed, CheckpointSaved
from eventloop.util.errors import WorkDirInUseError
from eventloop.util.text import error_text
from eventloop.util.waiting import SIGNAL_SECONDS, Promise

if TYPE_CHECKING:
    from eventloop.checkpoint.sharded.session import Session


logger = logging.getLogger("eventloop")

WhenBusy = Literal["wait", "skip", "replace"]
"""What to do when a save is due while earlier ones fill the queue: one of `CheckpointHook`'s `when_busy`."""
FAILED_SECONDS = 5.0
"""Seconds for which a training that an error ended waits for the votes of other ranks."""
NAMES = {True: "best checkpoints", False: "checkpoints"}
"""The names of waits in the costs, by whether a best checkpoint was waited for."""


class Saving(NamedTuple):
    """A running save.

    Attributes:
        path: the checkpoint's path.
        began: the `perf_counter` when the save began.
        written: the promise of its result.
        best: whether it is a best checkpoint.
        iter: the iteration of the state.
        record: the record of the hook's checkpoints, in which the result is recorded.
        rank, ranks: the number of this rank, and the number of ranks that write the checkpoint together. Only
            rank 0 learns whether the checkpoint is saved, and reports that.
    """

    path: Path
    began: float
    written: Promise[Written]
    best: bool
    iter: int
    record: Retention
    rank: int = 0
    ranks: int = 1


class Saves:
    """Start the saves of a hook, and report their results, in the order in which they are written."""

    def __init__(self) -> None:
        self.saver: Saver | None = None
        self.under_way: list[Saving] = []
        """The running saves; the first one is being written."""
        self.newest: Saving | None = None
        """The save that became durable last in this process.

        If a regular and a best checkpoint were saved in one iteration, it is the regular one.
        """
        self._skipped = 0  # the number of saves that were skipped or replaced since the last `close`
        self.durable = 0
        """The number of saves of this training that are durable."""
        self.errors: list[str] = []
        """The errors of the saves of this training that failed, each with its path."""

    def begin_training(self) -> None:
        """Begin to count the durable and failed saves of a training."""
        self.durable, self.errors = 0, []

    def begin(
        self,
        trainer: SavingTrainer,
        state: Mapping[str, Any],
        job: Job,
        session: Session | None = None,
        *,
        record: Retention,
        best: bool,
        overlap: bool,
        began: float,
    ) -> None:
        """Begin to save a state; return once all values that may change at any time are copied.

        Args:
            trainer: the trainer, whose optimizer step waits for the rest of the copy.
            state: the whole state of the trainer.
            job: the path, the label and the checkpoints to remove.
            session: the saves that all ranks write together; then this rank writes its part of the state.
            record: the record of the hook's checkpoints, in which the result is recorded.
            best: whether it is a best checkpoint.
            overlap: whether values that change only in the optimizer's step are copied later, during the next
                forward and backward pass.
            began: the `perf_counter` when the save began.
        """
        iteration = int(state["meta"]["iter"])
        if session is not None:
            state, part = session.prepare(job.path.name, state)
            job = job._replace(part=part)
        saver = self._saver_for(trainer)
        later = trainer.copying.may_come_later if overlap else None
        written = saver.save(state, job, later=later)
        trainer.copying.begin(saver.join)
        who = (0, 1) if job.part is None else (job.part.rank, job.part.ranks)
        self.under_way.append(Saving(job.path, began, written, best, iteration, record, *who))

    def mark(self, trainer: SavingTrainer, mark: Mark, record: Retention) -> None:
        """Begin to mark a durable checkpoint as one of the best, without saving its state again.

        Args:
            trainer: the trainer.
            mark: the names of both checkpoints, and the checkpoints to remove.
            record: the record of the hook's checkpoints, in which the result is recorded.
        """
        self._await(trainer, mark.source)
        written = self._saver_for(trainer).mark(mark)
        self.under_way.append(Saving(mark.path, perf_counter(), written, True, mark.iteration, record))

    def _await(self, trainer: SavingTrainer, path: Path) -> None:
        """Wait for the running save of a path, if any, and for the saves before it.

        A checkpoint to be marked is still being saved only if a resumed run repeats an iteration.
        """
        while any(saving.path == path for saving in self.under_way):
            self._report(trainer, self.under_way[0])

    def _saver_for(self, trainer: SavingTrainer) -> Saver:
        """Return the saver, which is created at the first save."""
        if self.saver is None:
            bus, ownership = trainer.bus, trainer.ownership
            self.saver = Saver(urgent=lambda: not bus.overtime, lost=lambda: ownership.lost)
        return self.saver

    def report_done(self, trainer: SavingTrainer) -> None:
        """Report the saves that have become durable or have failed."""
        while self.under_way and self.under_way[0].written.done():
            self._report(trainer, self.under_way[0])

    def make_room(self, trainer: SavingTrainer, when_busy: WhenBusy) -> bool:
        """Make room for another save within `QUEUE_BYTES`; return whether that save may begin.

        While there is no room, "skip" returns False. "wait" waits for the oldest running saves, and reports
        them. "replace" drops the saves that are not being written yet, and reports that they failed.

        Once a signal ends the run, no other rank's vote is waited for: a launcher sends the signal because a
        rank has died, and kills this rank soon. Then the next save begins without room.
        """
        while self.saver is not None and self.saver.full:
            if when_busy == "skip":
                return False
            if when_busy == "replace":
                self.saver.drop_waiting()
                for saving in [saving for saving in self.under_way if saving.written.done()]:
                    self._report(trainer, saving)
                break
            oldest = self.under_way[0]
            if oldest.ranks > 1 and not _waited_for(oldest, trainer):
                break
            self._report(trainer, oldest)
        return True

    def finish(self, trainer: SavingTrainer, *, failed: bool = False) -> None:
        """Wait for all running saves, and report them.

        Args:
            trainer: the trainer, which announces the results.
            failed: whether an error has ended the training. Then another rank may be gone, so a save of
                several ranks is waited for at most `FAILED_SECONDS`; the saver's process goes on with it.
        """
        if failed and any(saving.ranks > 1 for saving in self.under_way):
            self.abandon(trainer, FAILED_SECONDS)
        while self.under_way:
            self._report(trainer, self.under_way[0])

    def close(self, trainer: SavingTrainer) -> None:
        """Wait for all running saves, report them, and end the saver."""
        self.finish(trainer)
        skipped, self._skipped = self._skipped, 0
        if skipped > 1:
            logger.warning(
                "%d checkpoints were left out, because another one was still being written: to save them "
                'all, use a longer interval or when_busy="wait"',
                skipped,
            )
        if self.saver is not None:
            with waiting("checkpoint", NAMES[False]):
                self.saver.close()
            self.saver = None

    def abandon(self, trainer: SavingTrainer, timeout: float = AT_ONCE_SECONDS) -> None:
        """End the saver after `timeout` seconds at most; report the saves that are done or cancelled."""
        if self.saver is None:
            return
        saver, self.saver = self.saver, None
        with waiting("checkpoint", NAMES[False]):
            running = saver.abandon(timeout)
        for saving in list(self.under_way):
            if saving.written.done() and not isinstance(saving.written.exception(), SaveGivenUp):
                self._report(trainer, saving)
            elif saving.path.absolute() in running:
                self.under_way.remove(saving)
                logger.warning("checkpoint %s is still being written; its process finishes it", saving.path)
            else:
                logger.warning("checkpoint %s was given up; older ones are intact", saving.path)
                self._fail(trainer, saving, "given up: the run was aborted")

    def skip(self, trainer: SavingTrainer, path: Path) -> None:
        """Report that a checkpoint is skipped because another one is still being written."""
        reason = f"skipped: {self.under_way[-1].path.name} was still being written"
        self._count_skipped(path, reason)
        trainer.announce(CheckpointFailed, path=str(path), seconds=0.0, error=reason)

    def _count_skipped(self, path: Path, reason: str) -> None:
        """Count a skipped save; log only the 1st, 2nd, 4th, 8th, ..., as a slow disk may cause very many."""
        self._skipped += 1
        if self._skipped & (self._skipped - 1) == 0:
            so_far = f" ({self._skipped} skipped so far)" if self._skipped > 1 else ""
            logger.warning("checkpoint %s was %s%s", path, reason, so_far)

    def _report(self, trainer: SavingTrainer, saving: Saving) -> None:
        """Wait for a save, and report its result."""
        path = str(saving.path)
        try:
            done = saving.written.done()
            with nullcontext() if done else waiting("checkpoint", NAMES[saving.best]):
                size, durable = saving.written.result()
        except SaveReplacedError:
            reason = "replaced by a newer one before it was written"
            self._count_skipped(saving.path, reason)
            self._fail(trainer, saving, reason)
            return
        except WorkDirInUseError as error:
            logger.warning("checkpoint %s", error)
            self._fail(trainer, saving, str(error))
            return
        except Exception as error:  # a full disk raises an OSError, or a RuntimeError of torch
            logger.exception("checkpoint %s was not saved; older ones are intact", path)
            self.errors.append(f"{path}: {error_text(error)}")
            self._fail(trainer, saving, error_text(error))
            return
        self.durable += 1
        self.under_way.remove(saving)  # only now, so that after a Ctrl-C the save is reported later
        if self.newest is None or not saving.best or saving.iter != self.newest.iter:
            self.newest = saving
        if not saving.rank:
            saving.record.done(saving.path.name)
            trainer.announce(CheckpointSaved, path=path, bytes=size, seconds=durable - saving.began)

    def _fail(self, trainer: SavingTrainer, saving: Saving, error: str) -> None:
        """Record that a save failed, and announce it on rank 0."""
        self.under_way.remove(saving)
        if saving.rank:
            return
        saving.record.failed(saving.path.name)
        seconds = perf_counter() - saving.began
        trainer.announce(CheckpointFailed, path=str(saving.path), seconds=seconds, error=error)


def _waited_for(saving: Saving, trainer: SavingTrainer) -> bool:
    """Wait for a save; return False if a signal ends the run before it is done."""
    with nullcontext() if saving.written.done() else waiting("checkpoint", NAMES[saving.best]):
        while not saving.written.wait(SIGNAL_SECONDS):
            if not trainer.bus.overtime:
                return False
    return True


def all_failed(hooks: Sequence[Saves]) -> str:
    """Return a text about the failed saves of a training if no save is durable; "" otherwise."""
    errors = [error for saves in hooks for error in saves.errors]
    if not errors or any(saves.durable for saves in hooks):
        return ""
    count = "its save" if len(errors) == 1 else f"all {len(errors)} saves"
    return f"{count} failed, the last one at {errors[-1]}"
