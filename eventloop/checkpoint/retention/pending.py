"""The saves of a `CheckpointHook` that are under way, and what is told of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from eventloop.checkpoint.disk import SaveGivenUp
from eventloop.checkpoint.retention.best import Best
from eventloop.checkpoint.saving.overlapped_copy import Copying
from eventloop.checkpoint.saving.saver import Also, Saver, SaveReplacedError
from eventloop.checkpoint.saving.saver_client import Job, Written
from eventloop.events import CheckpointFailed, CheckpointSaved, Event
from eventloop.util.text import error_text
from eventloop.util.waiting import Promise


class SavingTrainer(Protocol):
    """The parts of a trainer that saves are reported to."""

    copying: Copying

    def announce(self, event_type: type[Event], **fields: Any) -> None:
        """Emit an event with the trainer's counters."""


logger = logging.getLogger("eventloop")


class Saving(NamedTuple):
    """A checkpoint on its way to the disk, and the iteration it is of; of a best one the best ones before it."""

    path: Path
    began: float
    written: Promise[Written]
    bests: dict[str, Best] | None
    iter: int


class Saves:
    """Begins saves, reports what became of them, and waits for them, or for nobody.

    Args:
        new_saver: makes what saves, when there is something to save.
        saved, failed: told of each save before its event is emitted.
    """

    def __init__(
        self,
        new_saver: Callable[[], Saver],
        saved: Callable[[Saving], None],
        failed: Callable[[Saving], None],
    ) -> None:
        self._new_saver, self._saved, self._failed = new_saver, saved, failed
        self.saver: Saver | None = None
        self.under_way: list[Saving] = []
        """The one that is being written first."""
        self.newest: Saving | None = None
        """The save that became durable last in this process; a best checkpoint does not replace the regular one of its
        iteration."""
        self._left_out = 0  # skipped or replaced in this run

    @property
    def busy(self) -> bool:
        """True while one is being written."""
        return self.saver is not None and self.saver.busy

    def begin(
        self,
        trainer: SavingTrainer,
        state: Mapping[str, Any],
        job: Job,
        *,
        bests: dict[str, Best] | None,
        if_former: tuple[Path, ...],
        overlap: bool,
        began: float,
    ) -> None:
        """Begin to save `state`, which `gather` made.

        Args:
            bests: of a best one those before it, for `Saving`.
            if_former: what it replaces besides, if the one that is under way by now becomes durable.
        """
        if self.saver is None:
            self.saver = self._new_saver()
        also = Also(self.under_way[-1].written, if_former) if self.under_way and if_former else None
        later = trainer.copying.may_come_later if overlap else None
        written = self.saver.save(state, job, later=later, also=also)
        trainer.copying.begin(self.saver.join)
        iteration = int(state["meta"]["iter"])
        self.under_way.append(Saving(job.path, began, written, bests, iteration))

    def report_done(self, trainer: SavingTrainer) -> None:
        """Report those that have become durable, or have failed."""
        while self.under_way and self.under_way[0].written.done():
            self._report(trainer, self.under_way[0])

    def drop_waiting(self, trainer: SavingTrainer) -> None:
        """Give up the one that waits to be written, now, so that it is not counted among those that are kept."""
        if self.saver is not None:
            self.saver.drop_waiting()
            for saving in [saving for saving in self.under_way if saving.written.done()]:
                self._report(trainer, saving)

    def supersede(self) -> None:
        """A newer one is saved next, and the time is short; see there."""
        if self.saver is not None:
            self.saver.supersede()

    def finish(self, trainer: SavingTrainer) -> None:
        """Wait for all of them, and report them."""
        while self.under_way:
            self._report(trainer, self.under_way[0])

    def close(self, trainer: SavingTrainer) -> None:
        """Wait for all of them, and let the saver go."""
        self.finish(trainer)
        left_out, self._left_out = self._left_out, 0
        if left_out > 1:
            logger.warning(
                "%d checkpoints were left out, because another one was still being written: a longer interval, or "
                'when_busy="wait", leaves out none',
                left_out,
            )
        if self.saver is not None:
            self.saver.close()
            self.saver = None

    def abandon(self, trainer: SavingTrainer) -> None:
        """Wait for nothing any more, and say what becomes of those under way."""
        if self.saver is None:
            return
        saver, self.saver = self.saver, None
        left = saver.abandon()
        for saving in list(self.under_way):
            if saving.written.done() and not isinstance(saving.written.exception(), SaveGivenUp):
                self._report(trainer, saving)
            elif left == "process":
                self.under_way.remove(saving)
                logger.warning(
                    "checkpoint %s is still being written, by a process that finishes it", saving.path
                )
            else:
                logger.warning("checkpoint %s was given up; older ones are intact", saving.path)
                self._fail(trainer, saving, "given up: the run was ended at once")

    def skip(self, trainer: SavingTrainer, path: Path) -> None:
        """Say that a checkpoint was due and is left out, because of the one before."""
        reason = f"skipped: {self.under_way[-1].path.name} was still being written"
        self._tell_left_out(path, reason)
        trainer.announce(CheckpointFailed, path=str(path), seconds=0.0, error=reason)

    def _tell_left_out(self, path: Path, reason: str) -> None:
        """Log the 1st, 2nd, 4th, 8th, ...: a disk that is too slow leaves out one after the other."""
        self._left_out += 1
        if self._left_out & (self._left_out - 1) == 0:
            so_far = f" ({self._left_out} left out so far)" if self._left_out > 1 else ""
            logger.warning("checkpoint %s was %s%s", path, reason, so_far)

    def _report(self, trainer: SavingTrainer, saving: Saving) -> None:
        """Wait for a save, and say what became of it."""
        path = str(saving.path)
        try:
            size, durable = saving.written.result()
        except SaveReplacedError:
            reason = "replaced by a newer one before it was written"
            self._tell_left_out(saving.path, reason)
            self._fail(trainer, saving, reason)
            return
        except Exception as error:  # a full disk comes as an OSError, or as torch's RuntimeError
            logger.exception("checkpoint %s was not saved; older ones are intact", path)
            self._fail(trainer, saving, error_text(error))
            return
        self.under_way.remove(saving)  # not before: Ctrl-C leaves it as it is
        if self.newest is None or saving.bests is None or saving.iter != self.newest.iter:
            self.newest = saving
        self._saved(saving)
        trainer.announce(CheckpointSaved, path=path, bytes=size, seconds=durable - saving.began)

    def _fail(self, trainer: SavingTrainer, saving: Saving, error: str) -> None:
        self.under_way.remove(saving)
        self._failed(saving)
        seconds = perf_counter() - saving.began
        trainer.announce(CheckpointFailed, path=str(saving.path), seconds=seconds, error=error)
