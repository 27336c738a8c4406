"""Start the saves of a `CheckpointHook`, track the running ones, and report their results as events.

`CheckpointHook` uses it on the training thread; the saver writes in the background.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from eventloop.bus import Bus
from eventloop.checkpoint.disk import SaveGivenUp
from eventloop.checkpoint.saving.overlapped_copy import Copying
from eventloop.checkpoint.saving.saver import Saver, SaveReplacedError
from eventloop.checkpoint.saving.saver_client import Job, Written
from eventloop.costs.waits import waiting
from eventloop.events import CheckpointFailed, CheckpointSaved, Event
from eventloop.util.errors import WorkDirInUseError
from eventloop.util.text import error_text
from eventloop.util.waiting import Promise


class Ownership(Protocol):
    """The part of the ownership of a run's directories that saves read."""

    lost: bool
    """True once another run has taken a directory."""


class SavingTrainer(Protocol):
    """The parts of a trainer that saves need: its overlapped copies, its bus, and events about results."""

    copying: Copying
    bus: Bus

    @property
    def ownership(self) -> Ownership:
        """The ownership of the directories in which the trainer saves."""

    def announce(self, event_type: type[Event], **fields: Any) -> None:
        """Emit an event with the trainer's counters."""


logger = logging.getLogger("eventloop")

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
    """

    path: Path
    began: float
    written: Promise[Written]
    best: bool
    iter: int


class Saves:
    """The running saves of a hook, in the order in which they are written.

    Args:
        saved, failed: called with the name of each finished or failed save, before its event is emitted.
    """

    def __init__(self, saved: Callable[[str], None], failed: Callable[[str], None]) -> None:
        self._saved, self._failed = saved, failed
        self.saver: Saver | None = None
        self.under_way: list[Saving] = []
        """The running saves; the first one is being written."""
        self.newest: Saving | None = None
        """The save that became durable last in this process.

        If a regular and a best checkpoint were saved in one iteration, it is the regular one.
        """
        self._skipped = 0  # saves skipped or replaced in this run
        self.durable = 0
        """The number of saves of this training that are durable."""
        self.errors: list[str] = []
        """The errors of the saves of this training that failed, each with its path."""

    def begin_training(self) -> None:
        """Begin to count the saves of a training."""
        self.durable, self.errors = 0, []

    @property
    def full(self) -> bool:
        """Return whether another save would exceed the queue's limit of bytes."""
        return self.saver is not None and self.saver.full

    def begin(
        self,
        trainer: SavingTrainer,
        state: Mapping[str, Any],
        job: Job,
        *,
        best: bool,
        overlap: bool,
        began: float,
    ) -> None:
        """Begin to save a state; return once all values that may change at any time are copied.

        Args:
            trainer: the trainer, whose optimizer step waits for the rest of the copy.
            state: the whole state of the trainer.
            job: the path, the label and the checkpoints to remove.
            best: whether it is a best checkpoint.
            overlap: whether values that change only in the optimizer's step are copied later, during the next
                forward and backward pass.
            began: the `perf_counter` when the save began.
        """
        if self.saver is None:
            bus, ownership = trainer.bus, trainer.ownership
            self.saver = Saver(urgent=lambda: not bus.overtime, lost=lambda: ownership.lost)
        later = trainer.copying.may_come_later if overlap else None
        written = self.saver.save(state, job, later=later)
        trainer.copying.begin(self.saver.join)
        self.under_way.append(Saving(job.path, began, written, best, int(state["meta"]["iter"])))

    def report_done(self, trainer: SavingTrainer) -> None:
        """Report the saves that have become durable or have failed."""
        while self.under_way and self.under_way[0].written.done():
            self._report(trainer, self.under_way[0])

    def make_room(self, trainer: SavingTrainer) -> None:
        """Wait for the oldest running saves until there is room for another one, and report them."""
        while self.full:
            self._report(trainer, self.under_way[0])

    def drop_waiting(self, trainer: SavingTrainer) -> None:
        """Drop the saves that are not being written yet, and report them, because they are not kept."""
        if self.saver is not None:
            self.saver.drop_waiting()
            for saving in [saving for saving in self.under_way if saving.written.done()]:
                self._report(trainer, saving)

    def finish(self, trainer: SavingTrainer) -> None:
        """Wait for all running saves, and report them."""
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

    def abandon(self, trainer: SavingTrainer) -> None:
        """End the saver without waiting for running saves; report the saves that are done or cancelled."""
        if self.saver is None:
            return
        saver, self.saver = self.saver, None
        with waiting("checkpoint", NAMES[False]):
            running = saver.abandon()
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
        """Log the 1st, 2nd, 4th, 8th, ... skipped save only, because a slow disk may cause very many."""
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
        self._saved(saving.path.name)
        trainer.announce(CheckpointSaved, path=path, bytes=size, seconds=durable - saving.began)

    def _fail(self, trainer: SavingTrainer, saving: Saving, error: str) -> None:
        self.under_way.remove(saving)
        self._failed(saving.path.name)
        seconds = perf_counter() - saving.began
        trainer.announce(CheckpointFailed, path=str(saving.path), seconds=seconds, error=error)


def all_failed(hooks: Sequence[Saves]) -> str:
    """Describe the failures if no save of a training's hooks is durable; "" otherwise, or without a save."""
    errors = [error for saves in hooks for error in saves.errors]
    if not errors or any(saves.durable for saves in hooks):
        return ""
    count = "its save" if len(errors) == 1 else f"all {len(errors)} saves"
    return f"{count} failed, the last one at {errors[-1]}"
