"""Write groups of saves in the saver's process, or on a thread of the training process where that fails.

The saver uses it, on the thread that writes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from eventloop.checkpoint.commit import Outcome, Save
from eventloop.checkpoint.disk import SaveGivenUp
from eventloop.checkpoint.saving.saver_client import ProcessGoneError, SaverProcess
from eventloop.checkpoint.saving.task import SaveTask
from eventloop.temporary.leftovers import remove_unfinished

logger = logging.getLogger("eventloop")

Write = Callable[..., list[Outcome]]
"""A function like `commit`: it takes saves, and `given_up`, an event that cancels them."""
STARTS = 4
"""The largest number of starts of the process; if it dies repeatedly, a thread writes instead."""
STARTING_BYTES = 64 << 20
"""The largest size in bytes of a group that a thread writes while the process starts, which takes 0.1 s."""


class GroupWriter:
    """Makes groups of saves durable; all methods but `give_up` are called on the thread that writes.

    Args:
        write: the function with which the calling thread writes.
        process: whether a process writes, if one can be started.
        urgent: returns whether a signal has asked the program to end. Then no process is started any more,
            and a process that stands still is killed after a second.
    """

    def __init__(self, write: Write, *, process: bool, urgent: Callable[[], bool]) -> None:
        self._write, self._urgent = write, urgent
        self.uses_process = process
        self.process: SaverProcess | None = None
        self._starts = 0
        self._removes = False  # whether the process has replaced checkpoints left to remove
        self._given_up = threading.Event()

    def commit(self, group: Sequence[SaveTask]) -> list[Outcome]:
        """Write a group of saves in the process if possible; write failed ones again on this thread."""
        if self._given_up.is_set():
            return [Outcome(error=SaveGivenUp(f"{task.job.path} was given up")) for task in group]
        saves = [task.save for task in group if task.save is not None]
        outcomes = None
        if not any(task.job.last for task in group) and all(task.seen_by_process for task in group):
            outcomes = self._commit_in_process(group, saves)
        if outcomes is None:
            outcomes = self._write(saves, given_up=self._given_up)
        else:
            self._removes |= any(save.replaces for save in saves)
            outcomes = [
                outcome if outcome.error is None else self._write([save], given_up=self._given_up)[0]
                for outcome, save in zip(outcomes, saves, strict=True)
            ]
        return outcomes

    def finish_removals(self) -> None:
        """Remove the checkpoints that the process has renamed, because no other group's sync serves them."""
        removes, self._removes = self._removes, False
        if self.process is None or not removes:
            return  # a thread removes with each commit
        try:
            warnings = self.process.finish_removals()
        except ProcessGoneError:
            self.process = None  # the checkpoints are hidden, and a later save or run removes them
        else:
            for warning in warnings:
                logger.warning("%s", warning)

    def give_up(self) -> None:
        """Cancel the saves that a thread writes; the process finishes those that it writes, however long."""
        self._given_up.set()
        if (process := self.process) is not None:  # the thread that writes may take it away
            process.leave()

    def end(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.end()

    def _commit_in_process(self, group: Sequence[SaveTask], saves: Sequence[Save]) -> list[Outcome] | None:
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
            for path in (task.job.path, *task.job.replaces):  # it may have died while it removed one of them
                remove_unfinished(path, process.pid)
            task.process = None
        return None

    def _running_process(self) -> SaverProcess | None:
        if self.process is None and self.uses_process and self._starts < STARTS and not self._urgent():
            self._starts += 1
            try:
                self.process = SaverProcess(self._urgent)
            except (OSError, ValueError) as error:  # a limit of processes or descriptors, a sandbox
                logger.warning(
                    "a checkpoint is written by a thread, because no process could be started: %s", error
                )
        return self.process
