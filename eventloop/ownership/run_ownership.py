"""Own the directories of a trainer's run, from before its first write until everything is written.

Each trainer has a `RunOwnership`; `RunScope` begins and ends it. Rank 0 acquires the directories for all
ranks, and an error of that is raised on all of them.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from eventloop.ownership.acquiring import acquire, await_end
from eventloop.ownership.holding import Heartbeat, Held
from eventloop.ownership.owner import State, read_owner
from eventloop.ownership.status import Outcome
from eventloop.temporary.leftovers import remove_dead
from eventloop.util.errors import WorkDirInUseError

logger = logging.getLogger("eventloop")


NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
"""The errors of a directory in which nobody with this user's rights can write, so that it needs no owner."""


class RunOwnership:
    """The ownership of the work_dir of a trainer, and of the directories of its checkpoint hooks.

    A run owns them if it trains, or has writers of files. An evaluation without such writers owns nothing. It
    may run during a training of another process in the directory, and writes nothing then.

    Args:
        places: returns the present work_dir, and then the directories in which the hooks save checkpoints.
        request_stop: called with the reason when another run has taken a directory.
        last_sequence: returns the last sequence number of the checkpoints in directories.
        decided: returns on all ranks what a function returns on rank 0.
        waits: whether a run waits while another run ends in a directory; False if a host drives the run.
    """

    def __init__(
        self,
        places: Callable[[], list[Path]],
        request_stop: Callable[[str], None],
        *,
        last_sequence: Callable[[Sequence[Path]], int],
        decided: Callable[[Callable[[], bool]], bool],
        waits: bool,
    ) -> None:
        self._places, self._request_stop, self._waits = places, request_stop, waits
        self._sequence_in, self._decided = last_sequence, decided
        self._heartbeat: Heartbeat | None = None
        self._owns = self._trains = False
        self._newest: int | None = None
        """The last sequence number of the checkpoints when the trainer resumed; None if it did not resume."""
        self.lost = False
        """True once another run owns a directory, because this run has not renewed its record in time."""
        self.each_second: list[Callable[[], object]] = []
        """Functions that a thread calls when the run owns the directories, then each second, and at its end.

        They may do I/O. The first error of each is logged. The run waits two seconds for them at its end.
        """
        self.outcome: Outcome | None = None
        """How the run ends; None before."""
        self._ended = False

    @property
    def ended(self) -> bool:
        """True once everything of the run is written except the results of functions in `each_second`.

        Among the calls of these functions only the last one finds it true.
        """
        return self._ended or (self._heartbeat is not None and self._heartbeat.ended)

    # --- a run ---------------------------------------------------------------------------------------------

    def begin(self, *, trains: bool, writes: bool) -> None:
        """Acquire the directories, before anything is written; with other ranks this is a collective.

        Args:
            trains: whether the run trains.
            writes: whether it has writers of files.

        Raises:
            WorkDirInUseError: a live run owns one of them, or another run has saved there since the trainer
                resumed. Nothing was changed.
        """
        self.lost = self._ended = False
        self.outcome = None
        self._owns = self._decided(lambda: self._begin(trains=trains, owns=trains or writes))
        self._trains = trains

    def _begin(self, *, trains: bool, owns: bool) -> bool:
        if owns:
            self._acquire(trains=trains)
        return owns

    def ending(self) -> None:
        """Record in the directories that the run is ending; signal handlers may call this."""
        if (heartbeat := self._heartbeat) is not None:
            heartbeat.ending()

    @property
    def is_ending(self) -> bool:
        """True from a signal, or the end of the training, until everything is written."""
        return self._heartbeat is not None and self._heartbeat.ends

    def end(self) -> None:
        """Release the directories, once everything is written; later calls do nothing more."""
        self._owns = False
        if self._heartbeat is not None:
            self._heartbeat.end()
            self._heartbeat = None
        self._ended = True
        if self._trains:
            self._trains, self._newest = False, None

    @property
    def may_write(self) -> bool:
        """Whether this trainer may write in its work_dir: it is the owner, or there is no living one."""
        if self._owns:
            return not self.lost
        try:
            owner = read_owner(self._places()[0])
        except OSError:
            return True
        return owner is None or owner.lives is False

    def _acquire(self, *, trains: bool) -> None:
        """Acquire all directories; after an error the caller calls `end`, which releases them."""
        acquired: list[Held] = []
        self._heartbeat = Heartbeat(acquired, self._report_lost, self.each_second)
        for directory in self._directories():
            try:
                state: State = "training" if trains else "evaluating"
                acquire(directory, state, waits=self._waits, acquired=acquired)
            except OSError as error:
                if error.errno not in NOT_WRITABLE:
                    raise
                # no run can write there
                logger.warning("%s has no owner, because it cannot be written: %s", directory, error)
        if trains:
            self._refuse_saved_since()
        self._heartbeat.start()
        for each in acquired:
            remove_dead(each.directory, owned=True)

    def _refuse_saved_since(self) -> None:
        """Refuse to train if another run has saved since this trainer resumed.

        Both runs would have continued from the same checkpoint, and would train the same iterations.
        """
        if (
            self._newest is None
            or (newest := self._sequence_in(places := self._places()[1:])) <= self._newest
        ):
            return
        there = " and ".join(map(str, places))
        raise WorkDirInUseError(
            f"another run has saved in {there} since this one resumed (sequence number {newest}, at the "
            f"resume {self._newest}): call trainer.resume() again, just before trainer.train()"
        )

    def _report_lost(self, directory: Path) -> None:
        """Stop the run without further saves, because another run now writes to the directory."""
        self.lost = True
        logger.error(
            "another run has taken %s, because this one gave no sign of life for too long: this run ends, "
            "and saves no more checkpoints",
            directory,
        )
        self._request_stop(f"another run has taken {directory}")

    def _directories(self) -> list[Path]:
        """Return the directories that a run writes, each once; they need not exist."""
        return [*{place.resolve(): None for place in self._places()}]

    # --- a resume ------------------------------------------------------------------------------------------

    def await_end(self) -> None:
        """Wait for another run that is ending in the directories; do nothing within a run of this trainer."""
        if not self._owns:
            with suppress(OSError):  # a directory cannot be read
                await_end(self._directories())

    def resumed_from(self, path: Path, newest: int) -> None:
        """Record a resume, so that `begin` can refuse to train if another run has saved after it.

        Args:
            path: the checkpoint. If it is in no directory of the run, `begin` refuses nothing, because this
                run does not continue what another run has saved there.
            newest: the largest sequence number of a checkpoint in the directories of the run, as scanned
                before the checkpoint was read. Each save gets the next number.
        """
        self._newest = newest if path.resolve().parent in self._directories() else None
