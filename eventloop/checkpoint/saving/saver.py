"""Save checkpoints in the background, so that the training thread waits only for a copy.

`CheckpointHook` uses it, through `retention.pending`. A save has three stages:

1. Copy. Small states and values that may change at any time are copied at once; the parameters and the
   optimizer's state are copied during the next forward and backward pass (`Snapshot`).
2. Encode. The state without the tensors' bytes is pickled, and the manifest is made, which lists the tensors.
3. Commit. Encoded saves wait in one queue. All that are in it are written together by the saver's process,
   which maps the copies. A thread of the training process writes instead if the process cannot be started, is
   still starting, failed or stands still, and at the end of a run, when the training does nothing else.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from eventloop.checkpoint.commit import Outcome, commit
from eventloop.checkpoint.disk import SaveGivenUp
from eventloop.checkpoint.saving.buffers import Buffers
from eventloop.checkpoint.saving.group_writer import GroupWriter, Write
from eventloop.checkpoint.saving.mark import Mark
from eventloop.checkpoint.saving.saver_client import Job, SaverProcess, Written, process_possible
from eventloop.checkpoint.saving.saver_thread import SaverThread
from eventloop.checkpoint.saving.snapshot import Snapshot
from eventloop.checkpoint.saving.task import SaveTask
from eventloop.temporary.leftovers import remove_unfinished
from eventloop.util.text import error_text
from eventloop.util.waiting import Promise

logger = logging.getLogger("eventloop")

QUEUE_BYTES = 64 << 20
"""The largest total size in bytes of states that wait or are being written; a single state may be larger."""
AT_ONCE = 8 << 20
"""The largest size in bytes of a state that is copied at once as a whole, in about a millisecond."""
AT_ONCE_SECONDS = 0.1
"""Seconds that `abandon` waits for running saves by default; most are done by then."""
EXIT_SECONDS = 10.0
"""Seconds that the interpreter's exit waits for the saves of an open saver; for a bus it waits as long."""


class SaveReplacedError(RuntimeError):
    """A save was dropped before it was written, because a newer state had to be saved."""


class Saver:
    """Save the states of one hook: copy them at once or soon, and make them durable in the background.

    Public methods are called on the training thread, except that the interpreter's exit may abandon a saver.

    Args:
        write: the function by which a thread writes if no process does; tests replace `commit`.
        process: whether a process writes, if one can be started.
        urgent: returns whether a signal has asked the program to end. Then no process is started any more,
            and a process that stands still is killed after a second.
        lost: returns whether another run has taken the directory. Then the saves that wait are dropped, and
            their promises raise WorkDirInUseError.
    """

    def __init__(
        self,
        write: Write = commit,
        *,
        process: bool = True,
        urgent: Callable[[], bool] = lambda: False,
        lost: Callable[[], bool] = lambda: False,
    ) -> None:
        uses_process = process and process_possible()
        self._groups = GroupWriter(write, process=uses_process, urgent=urgent, lost=lost)
        self._buffers: list[Buffers] = []
        self._copier: SaverThread | None = None
        self._writer: SaverThread | None = None
        self._tasks: list[SaveTask] = []  # running saves, oldest first; see `_running`
        self.waiting: list[SaveTask] = []
        """The saves that are encoded, and are not being written yet."""
        self._lock = threading.Lock()  # for `waiting` and each task's `begun`: a save is written or dropped
        self._size = 0  # the bytes of the last state

    @property
    def process(self) -> SaverProcess | None:
        """Return the process that writes; None while a thread writes."""
        return self._groups.process

    def save(
        self,
        state: Mapping[str, Any],
        job: Job,
        *,
        later: Callable[[], Collection[int]] | None = None,
    ) -> Promise[Written]:
        """Copy a state and begin to write it; once it is durable, the checkpoints it replaces are removed.

        Args:
            state: the state to save.
            job: the path, the label and the checkpoints to remove.
            later: called for a large state; returns the `data_ptr` of tensors that may be copied after this
                method has returned. The caller calls `join` before they change.

        Returns:
            The promise of the result, which also raises an error of the copy.
        """
        copier = self._start_threads()
        # absolute paths, because the program or its process may change the working directory
        job = job._replace(path=job.path.absolute(), replaces=tuple(map(Path.absolute, job.replaces)))
        snapshot = Snapshot(state)
        task, self._size = SaveTask(job, snapshot), snapshot.size
        try:
            self._copy(task, snapshot, later)
        except Exception as error:  # no memory, or a kind of tensor that cannot be copied: a failed save
            task.written.set_exception(error)
            return task.written
        self._tasks.append(task)
        copier.do(partial(self._encode, task))
        return task.written

    def mark(self, mark: Mark) -> Promise[Written]:
        """Start to mark a durable checkpoint as one of the best, after the saves that have begun before.

        Returns:
            The promise of the result.
        """
        copier = self._start_threads()
        task = SaveTask(Job(mark.path, must=True), save=mark)
        self._tasks.append(task)
        copier.do(partial(self._queue, task))  # behind the saves that are being copied
        return task.written

    def _start_threads(self) -> SaverThread:
        """Start the two threads unless they run, and return the thread that copies."""
        _open.add(self)
        self._writer = self._writer or SaverThread("checkpoint")
        self._copier = self._copier or SaverThread("checkpoint copy")
        return self._copier

    def _running(self) -> list[SaveTask]:
        """Forget the saves that have ended, and return the others."""
        self._tasks = [task for task in self._tasks if not task.written.done()]
        return self._tasks

    @property
    def busy(self) -> bool:
        """Return whether a save is running."""
        return bool(self._running())

    @property
    def full(self) -> bool:
        """Return whether another state as large as the last one would exceed `QUEUE_BYTES`."""
        running = self._running()
        return bool(running) and sum(task.size for task in running) + self._size > QUEUE_BYTES

    def drop_waiting(self) -> None:
        """Drop the saves that are not being written yet, except those that must be written.

        Their promises raise SaveReplacedError.
        """
        self.join()  # nothing may be copied into their buffers any more
        with self._lock:
            for task in self._running():
                if not (task.begun or task.job.must):
                    task.begun = True
                    task.written.set_exception(SaveReplacedError("a newer state was to be saved"))

    def join(self) -> None:
        """Wait until the tensors that are being copied may be changed."""
        for task in self._tasks:
            if task.snapshot is not None:
                task.snapshot.join()

    def close(self) -> None:
        """Wait for all saves, then end the threads and the process."""
        for task in list(self._tasks):
            task.written.wait()
        self._end_threads(None)
        _open.discard(self)

    def abandon(self, timeout: float = AT_ONCE_SECONDS) -> list[Path]:
        """Wait for running saves for at most `timeout` seconds, then stop waiting.

        The saver's process finishes the saves that it has begun. Other saves are cancelled, and their
        incomplete files are removed; no other file is touched. The saver cannot be used afterwards.

        Returns:
            The checkpoints that the saver's process is still writing. The promises of all other saves are
            done, unless a thread hangs.
        """
        _open.discard(self)
        tasks = list(self._tasks)
        until = monotonic() + timeout
        for task in tasks:
            task.written.wait(max(0.0, until - monotonic()))
        self._groups.give_up()
        self._end_threads(AT_ONCE_SECONDS)
        running = [task.job.path for task in tasks if task.process is not None and not task.written.done()]
        for task in tasks:
            given_up = not task.written.done() or isinstance(task.written.exception(), SaveGivenUp)
            if given_up and task.job.path not in running:
                # so that a thread which hangs in the disk, and goes on later, cannot complete the checkpoint
                remove_unfinished(task.job.path, os.getpid())
        return running

    def _end_threads(self, timeout: float | None) -> None:
        """End the thread that copies, then the thread that writes, which first ends the process.

        Args:
            timeout: the seconds to wait for each thread at most; None waits until it has ended.
        """
        # the copier ends first, because it gives the writer its work
        for thread, last_work in ((self._copier, None), (self._writer, self._groups.end)):
            if thread is not None:
                if last_work is not None:
                    thread.do(last_work)
                thread.end(timeout)
        self._copier = self._writer = None

    # --- copying -------------------------------------------------------------------------------------------

    def _copy(self, task: SaveTask, snapshot: Snapshot, later: Callable[[], Collection[int]] | None) -> None:
        """Copy a state into free buffers, except the tensors that `_encode` copies later.

        If no memory can be shared with the process, the state is copied into other memory, and a thread
        writes from then on.
        """
        pointers = later() if later is not None and task.size > AT_ONCE else ()
        watched = {} if task.job.part is None else task.job.part.watched
        buffers = self._free_buffers(shared=self._groups.uses_process and not task.small)
        try:
            snapshot.begin(buffers, pointers, watched)
        except (OSError, RuntimeError, MemoryError) as error:  # a limit of files' sizes, or of memory
            if not buffers.shared:
                raise
            reason = error_text(error)
            self._buffers.remove(buffers)
            buffers = self._free_buffers(shared=False)
            snapshot.begin(buffers, pointers, watched)  # raises again if the error had another cause
            self._groups.uses_process = False
            logger.warning(
                "checkpoints are written by a thread, as no memory could be shared with a process: %s", reason
            )
        task.buffers = buffers

    def _free_buffers(self, *, shared: bool) -> Buffers:
        """Return buffers that no running save uses."""
        used = [task.buffers for task in self._running()]
        for buffers in self._buffers:
            if buffers.shared == shared and buffers not in used:
                return buffers
        self._buffers.append(Buffers(shared=shared))
        return self._buffers[-1]

    def _encode(self, task: SaveTask) -> None:
        """Copy the tensors that `_copy` left out, encode the state, and queue it for writing."""
        try:
            task.encode()
        except BaseException as error:  # of any class: if this thread died, all later saves would wait for it
            with self._lock:
                if not task.begun:  # otherwise it was dropped, and its promise is done
                    task.begun = True
                    task.written.set_exception(error)
            return
        self._queue(task)

    def _queue(self, task: SaveTask) -> None:
        """Queue a save for writing."""
        with self._lock:
            self.waiting.append(task)
        if (writer := self._writer) is not None:
            writer.do(self._write_waiting)
        else:  # the saver was abandoned meanwhile, so `_write_waiting` only cancels the save
            self._write_waiting()

    def _write_waiting(self) -> None:
        """Write all saves that wait, as one group, and set their results."""
        with self._lock:
            group = [task for task in self.waiting if not task.begun]
            self.waiting.clear()
            for task in group:
                task.begun = True
        try:
            outcomes = self._groups.commit(group) if group else []
        except BaseException as error:  # of any class, or the promises would never be done
            outcomes = [Outcome(error=error)] * len(group)
        for task, outcome in zip(group, outcomes, strict=True):
            if outcome.error is not None:
                task.written.set_exception(outcome.error)
            else:
                task.written.set_result(Written(outcome.bytes, outcome.at))
        for warning in (warning for outcome in outcomes for warning in outcome.warnings):
            logger.warning("%s", warning)  # after the results, because a logging filter may raise
        if not self.waiting:
            self._groups.finish_removals()


_open: set[Saver] = set()


@atexit.register
def _end_all() -> None:
    """Abandon all savers at the interpreter's exit: torch aborts if a thread is still writing."""
    for saver in list(_open):
        saver.abandon(EXIT_SECONDS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open.clear)  # the threads and the process are the parent's
