"""Write groups of saves in the saver's process, or on a thread if the process cannot write them.

The saver uses it, on its thread "checkpoint" of the training process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from eventloop.checkpoint.commit import AnySave, Outcome, Removals, Save
from eventloop.checkpoint.disk import SaveGivenUp
from eventloop.checkpoint.saving.saver_client import ProcessGoneError, SaverProcess
from eventloop.checkpoint.saving.task import SaveTask
from eventloop.temporary.leftovers import remove_unfinished
from eventloop.util.errors import WorkDirInUseError

logger = logging.getLogger("eventloop")

Write = Callable[..., list[Outcome]]
"""The type of `commit` and its replacements in tests, called as `write(saves, given_up=, removals=)`."""
STARTS = 4
"""How often the process is started at most; if it has died as often, a thread writes all later saves."""
STARTING_BYTES = 64 << 20
"""The largest size in bytes of a group that a thread writes while the process starts, which takes 0.1 s."""


class GroupWriter:
    """Make groups of saves durable; all methods but `give_up` are called on the saver's thread that writes.

    Args:
        write: the function by which this thread writes if the process does not.
        process: whether a process writes, if one can be started.
        urgent: returns whether a signal has asked the program to end. Then no process is started any more,
            and a process that stands still is killed after a second.
        lost: returns whether another run has taken the directory. Then no other group is written.
    """

    def __init__(
        self, write: Write, *, process: bool, urgent: Callable[[], bool], lost: Callable[[], bool]
    ) -> None:
        self._write, self._urgent, self._lost = write, urgent, lost
        self.uses_process = process
        self.process: SaverProcess | None = None
        self._starts = 0  # how often the process was started
        self._process_removes = False  # whether saves in the process replaced checkpoints not yet removed
        self._removals = Removals()  # the checkpoints that saves on this thread replaced
        self._given_up = threading.Event()

    def commit(self, group: Sequence[SaveTask]) -> list[Outcome]:
        """Write a group of saves in the process if possible; write failed ones again on this thread."""
        if self._given_up.is_set():
            return [Outcome(error=SaveGivenUp(f"{task.job.path} was given up")) for task in group]
        if self._lost():
            why = "was not written, because another run has taken its directory"
            return [Outcome(error=WorkDirInUseError(f"{task.job.path} {why}")) for task in group]
        saves = [task.save for task in group if task.save is not None]
        outcomes = None
        if not any(task.job.last for task in group) and all(task.seen_by_process for task in group):
            outcomes = self._commit_in_process(group, saves)
        if outcomes is None:
            return self._commit_here(saves)
        self._process_removes |= any(save.replaces for save in saves)
        return self._repeat_failed(saves, outcomes)

    def _commit_here(self, saves: Sequence[AnySave]) -> list[Outcome]:
        return self._write(saves, given_up=self._given_up, removals=self._removals)

    def _repeat_failed(self, saves: Sequence[AnySave], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Write saves again, on this thread, that failed in the process.

        A save is not repeated if a later one of the group has written a checkpoint of the same name. A rank's
        part of a checkpoint is not repeated, because the rank has already voted against the checkpoint.
        """
        outcomes = [*outcomes]
        for number, save in enumerate(saves):
            if outcomes[number].error is None or not isinstance(save, Save):
                continue
            after = zip(saves[number + 1 :], outcomes[number + 1 :], strict=True)
            later = [other for other, outcome in after if outcome.error is None]
            if save.path in {other.path for other in later}:
                continue
            (outcomes[number],) = self._commit_here([save])
            # a later save may replace this one, which did not exist when that one became durable
            for other in later:
                _log(self._removals.rename(other.replaces, other.spares))
        return outcomes

    def finish_removals(self) -> None:
        """Remove the replaced checkpoints now.

        The sync of the next group would make their temporary names durable, but no group follows.
        """
        warnings = self._removals.finish()
        process_removes, self._process_removes = self._process_removes, False
        if self.process is not None and process_removes:
            try:
                warnings += self.process.finish_removals()
            except ProcessGoneError:
                self.process = None  # they have hidden names by now, and a later save or run removes them
        _log(warnings)

    def give_up(self) -> None:
        """Cancel the saves that a thread writes; the process finishes its saves, however long that takes."""
        self._given_up.set()
        if (process := self.process) is not None:  # read once, as the thread that writes may set it to None
            process.disable_kill()

    def end(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.end()

    def _commit_in_process(self, group: Sequence[SaveTask], saves: Sequence[AnySave]) -> list[Outcome] | None:
        """Return the outcomes of saves written by the process; None if a thread has to write them."""
        process = self._running_process()
        if process is None:
            return None
        try:
            if sum(task.size for task in group) <= STARTING_BYTES and not process.ready():
                return None
            for task in group:
                task.process = process
            return process.commit(saves)
        except ProcessGoneError as error:
            always = "" if self._starts < STARTS else "; from now on a thread writes all of them"
            logger.warning(
                "a checkpoint is written by a thread, because the process could not: %s%s", error, always
            )
        self.process = None
        for task in group:
            remove_unfinished(task.job.path, process.pid)
            task.process = None
        return None

    def _running_process(self) -> SaverProcess | None:
        """Return the process, which is started if necessary; None if it cannot or may not be started."""
        if self.process is None and self.uses_process and self._starts < STARTS and not self._urgent():
            self._starts += 1
            try:
                self.process = SaverProcess(self._urgent)
            except (OSError, ValueError) as error:  # a limit of processes or descriptors, a sandbox
                logger.warning(
                    "a checkpoint is written by a thread, because no process could be started: %s", error
                )
        return self.process


def _log(warnings: Sequence[str]) -> None:
    for warning in warnings:
        logger.warning("%s", warning)
