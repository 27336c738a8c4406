"""Writing checkpoints without holding up the training thread.

Three things happen to a state. It is copied: what is small or may change at any time at once, the parameters and the
optimizer's state beside the next forward and backward pass (`Rest`). It is serialised, hashed and written: Python,
on a second thread, takes the interpreter from the training thread, so a process does that, from the copy in shared
memory. But a process has to import torch, for seconds, so it is started only by a run that has lasted a while; until
it is ready, and wherever it cannot be had, a thread writes. Then it is durable, and what it replaces is removed.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Literal, NamedTuple

from eventloop.checkpoint.cleanup import remove_replaced, remove_unfinished
from eventloop.checkpoint.disk import SaveGivenUp
from eventloop.checkpoint.saving.crc32 import without_crc32
from eventloop.checkpoint.saving.save_timeout import Owed, Patience
from eventloop.checkpoint.saving.saver_client import Job, ProcessGoneError, SaverProcess, Written
from eventloop.checkpoint.saving.saver_thread import SaverThread
from eventloop.checkpoint.saving.snapshot import Packed, Rest, Snapshot
from eventloop.checkpoint.store import Serialized
from eventloop.state.tensors import bytes_of, tensors_of
from eventloop.util.text import error_text
from eventloop.util.waiting import Promise

logger = logging.getLogger("eventloop")

State = Mapping[str, Any] | Serialized
Write = Callable[[State, Job, threading.Event], int]
"""`(state, job, given_up) -> bytes`: writes durably, and raises SaveGivenUp soon after `given_up` is set."""

START_AFTER_SECONDS = 3.0
"""Age of a saver from which a save starts the process."""
STARTS = 4
"""Times that a process is started, where it dies: one that does so again and again would only cost."""
SMALL = 1 << 20
FEW = 100
"""Bytes of tensors, and how many, up to which a state is serialised on the training thread rather than on the writing
thread: torch takes 20 us for each tensor, ten times as long as to copy it."""
AT_ONCE = 8 << 20
"""Bytes of tensors up to which everything is copied at once: about a millisecond, less than handing it over is worth."""
AT_ONCE_SECONDS = 0.1
"""How long a save that nobody waits for any more is waited for all the same: most are done by then."""
EXIT_SECONDS = 10.0
"""How long the interpreter's exit waits for a save whose saver nobody closed; as long as for a bus."""

Left = Literal["", "given up", "process"]
"""What `Saver.abandon` left of a save: nothing, no file, or a process that finishes it alone."""


class SaveReplacedError(RuntimeError):
    """A newer state took the place of one that was waiting to be written."""


class Also(NamedTuple):
    """What a save replaces besides, if the one that was begun before it became durable too."""

    former: Promise[Written]
    replaces: tuple[Path, ...]


class _Task:
    """A save on its way."""

    def __init__(
        self, job: Job, written: Owed, copy: Packed | State, snapshot: Snapshot | None, also: Also | None
    ) -> None:
        self.job, self.written, self.copy, self.snapshot, self._also = job, written, copy, snapshot, also
        self.begun = threading.Event()
        """Set once it is being written, and can no longer be replaced."""

    @property
    def rest(self) -> Rest | None:
        """What is still being copied of it."""
        return self.copy.rest if isinstance(self.copy, Packed) else None

    def settled_job(self) -> Job:
        """The job, once it is known what became of the save before: whoever writes does one after the other."""
        if self._also is None or self._also.former.exception() is not None:
            return self.job
        return self.job._replace(replaces=(*self.job.replaces, *self._also.replaces))


def _from_root(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The same, in whatever directory the program is when it comes to them, or its process."""
    return tuple(path.absolute() for path in paths)


class Saver:
    """Copies a state at once or soon, and makes it durable later.

    Args:
        write: how the thread writes.
        start_after: seconds from which on a process is worth its start; None never.
        spare: have a second set of buffers, so that a state can be copied while another is being written: the one
            that is copied waits, and a newer one takes its place. Without, the save before must be done.
    """

    def __init__(
        self, write: Write, *, start_after: float | None = START_AFTER_SECONDS, spare: bool = False
    ) -> None:
        self._write = write
        self._start_after = start_after
        self._born = monotonic()
        self._snapshots = [Snapshot() for _ in range(2 if spare else 1)]
        self._shared = False  # they lie where a process can see them
        self._copier: SaverThread | None = None
        self._writer: SaverThread | None = None
        self._tasks: list[_Task] = []  # under way: the one being written first
        self._lock = threading.Lock()  # of what decides whether a task is written or replaced
        self._given_up = threading.Event()
        self._patience = Patience()
        self._starts = 0
        self.process: SaverProcess | None = None

    def save(
        self,
        state: Mapping[str, Any],
        job: Job,
        *,
        later: Callable[[], Collection[int]] | None = None,
        also: Also | None = None,
    ) -> Promise[Written]:
        """Copy `state` and start writing it; once it is durable, remove what it replaces.

        Args:
            later: asked for a large state, what need not be copied at once: see `Snapshot.pack`. The caller calls
                `join` before those change.
            also: what it replaces besides, depending on the save before.

        Raises:
            RuntimeError: the save before is under way, and there are no spare buffers.
        """
        _open.add(self)
        self._make_room()
        self._writer = self._writer or SaverThread("checkpoint")
        written = Owed(job.path, self._patience)
        try:
            job = job._replace(path=job.path.absolute(), replaces=_from_root(job.replaces))
            also = also and also._replace(replaces=_from_root(also.replaces))
            task = _Task(job, written, *self._copy(state, written, later), also)
        except Exception as error:
            written.set_exception(
                error
            )  # no memory, a kind of tensor that nobody can copy: a save that failed
            return written
        self._tasks.append(task)
        if task.rest is not None and task.rest.left:
            self._copier = self._copier or SaverThread("checkpoint copy")
            self._copier.do(lambda: self._finish_copy(task))
        else:
            self._hand_over(task)
        return task.written

    @property
    def busy(self) -> bool:
        """True while a save is under way."""
        self._tasks = [task for task in self._tasks if not task.written.done()]
        return bool(self._tasks)

    def drop_waiting(self) -> None:
        """Replace the save that waits for its turn by none; one that is being written by now is waited for."""
        if self.busy:
            for task in self._tasks[1:]:
                self._replace(task)

    def supersede(self) -> None:
        """A newer state is saved next, and the time is short: what a process takes too long for is given up to it."""
        for task in self._tasks:
            task.written.superseded = not task.job.awaited

    def join(self) -> None:
        """Return once what is being copied may be changed."""
        for task in self._tasks:
            if task.rest is not None:
                task.rest.join()

    def close(self) -> None:
        """Let the threads and the process go, after what they are writing."""
        for task in list(self._tasks):
            task.written.wait()
        for thread in (self._copier, self._writer):  # in this order: the first gives the second its work
            if thread is not None:
                thread.end()
        self._copier = self._writer = None
        if self.process is not None:
            self.process.close()
        _open.discard(self)

    def abandon(self, timeout: float = AT_ONCE_SECONDS) -> Left:
        """Let the threads and the process go, and wait for a save under way no longer than `timeout` seconds. A
        process then finishes it alone; a thread gives it up and removes what it wrote. No other file is touched.
        The saver is of no use afterwards."""
        _open.discard(self)
        tasks = list(self._tasks)
        until = monotonic() + timeout
        pending = [task for task in tasks if not task.written.wait(max(0.0, until - monotonic()))]
        self._given_up.set()
        for thread in (self._copier, self._writer):
            if thread is not None:
                thread.end(AT_ONCE_SECONDS)
        if self.process is not None:
            self.process.leave()
        if any(task.written.process for task in pending) and self._process_lives():
            return "process"
        unwritten = [
            task
            for task in tasks
            if not task.written.done() or isinstance(task.written.exception(), SaveGivenUp)
        ]
        for task in unwritten:
            # of a thread that hangs: it will find nothing to rename
            remove_unfinished(task.job.path, os.getpid())
        return "given up" if unwritten else ""

    def start_process(self) -> None:
        """Start the process, where memory can be shared with one. What is under way is written from the buffers it
        was copied to, which go when it is done."""
        frozen = getattr(sys, "frozen", False)  # such a program's executable is the program
        if not hasattr(os, "memfd_create") or not sys.executable or frozen:
            self._start_after = None
            return
        self._starts += 1
        try:
            process = SaverProcess()
        except (
            OSError,
            ValueError,
        ) as error:  # a limit of processes, memory or descriptors, a sandbox, an odd path
            logger.warning(
                "a checkpoint is written by a thread, because no process could be started: %s", error
            )
            return
        if self.process is not None:
            self.process.close()
        if not self._shared:
            self._shared, self._snapshots = True, [Snapshot(shared=True) for _ in self._snapshots]
        self.process = process

    # --- copying -------------------------------------------------------------------------------------------

    def _copy(
        self, state: Mapping[str, Any], written: Owed, later: Callable[[], Collection[int]] | None
    ) -> tuple[Packed | State, Snapshot | None]:
        """A copy of a state, whose size becomes that of the promise, and the buffers that it lies in."""
        ready = self._process_ready()
        tensors = list(tensors_of(state))
        size = written.size = bytes_of(tensors)
        small = size <= SMALL and len(tensors) <= FEW
        if small and not ready and not any(t.is_cuda for t in tensors):
            return Serialized(state), None
        pointers = later() if later is not None and size > AT_ONCE else ()
        try:
            return self._pack(state, pointers)
        except (OSError, RuntimeError, MemoryError) as error:  # a limit of files' sizes, or of memory
            if not self._shared:
                raise
            reason = error_text(error)
        private = Snapshot()
        packed = private.pack(state, pointers)  # or it is not for the sharing that it cannot be copied
        self._shared, self._start_after = False, None
        self._snapshots = [private, *(Snapshot() for _ in self._snapshots[1:])]
        logger.warning(
            "checkpoints are written by a thread, as no memory could be shared with a process: %s", reason
        )
        return packed, private

    def _pack(self, state: Mapping[str, Any], pointers: Collection[int]) -> tuple[Packed, Snapshot]:
        snapshot = self._free_snapshot()
        return snapshot.pack(state, pointers), snapshot

    def _make_room(self) -> None:
        """The save that waits for its turn gives up its buffers."""
        if self.busy and len(self._snapshots) < 2:
            raise RuntimeError("the save before is under way: wait for it, or make the Saver with spare=True")
        self.drop_waiting()

    def _free_snapshot(self) -> Snapshot:
        """Buffers that nothing is written from."""
        used = [task.snapshot for task in self._tasks if not task.written.done()]
        return next(snapshot for snapshot in self._snapshots if snapshot not in used)

    def _replace(self, task: _Task) -> None:
        """Take a task's buffers, unless it is being written by now: then wait for it."""
        self.join()
        with self._lock:
            if not task.begun.is_set():
                task.begun.set()
                task.written.set_exception(SaveReplacedError("a newer state was to be saved"))
                return
        task.written.wait()

    def _finish_copy(self, task: _Task) -> None:
        rest = task.rest
        assert rest is not None
        try:
            rest.copy()
        except Exception as error:
            with self._lock:
                if not task.begun.is_set():  # else it was replaced
                    task.begun.set()
                    task.written.set_exception(error)
            return
        self._hand_over(task)

    # --- writing -------------------------------------------------------------------------------------------

    def _hand_over(self, task: _Task) -> None:
        assert self._writer is not None
        self._writer.do(lambda: self._settle(task))

    def _settle(self, task: _Task) -> None:
        with self._lock:
            if task.begun.is_set():
                return  # replaced
            task.begun.set()
        began = perf_counter()
        try:
            written = self._attempt(task)
        except Exception as error:
            task.written.set_exception(error)
        else:
            self._patience.learn(task.written.size, written.at - began)
            task.written.set_result(written)

    def _attempt(self, task: _Task) -> Written:
        copy, job = task.copy, task.settled_job()
        if self._given_up.is_set():
            raise SaveGivenUp(f"{job.path} was given up")
        if not isinstance(copy, Packed):
            return self._write_here(copy, job)
        if copy.rest is not None:
            copy.rest.wait()
        # the process takes only time that nobody wants: who waits for a save may not have so much of it
        process = self.process  # another may take the place of one that is gone
        if not job.awaited and process is not None and copy.layout.shared:
            task.written.process = process  # before it is asked: one that is in use is not replaced
            try:
                if process.ready and not task.written.hurried:
                    return process.save(copy, job, self._patience.alone(task.written.size))
            except ProcessGoneError as error:  # what it cannot do, a thread may; its error is what counts
                if not task.written.superseded:
                    logger.warning(
                        "a checkpoint is written by a thread, because the process could not: %s", error
                    )
            for path in (job.path, *job.replaces):  # of what it was removing too
                remove_unfinished(path, process.pid)
            task.written.process = None
        if task.written.superseded and task.written.hurried:
            raise SaveReplacedError("a newer state is to be saved at once")
        stands_still = job.awaited or task.written.hurried
        with without_crc32() if stands_still else nullcontext():
            return self._write_here(copy.unpack(), job)

    def _write_here(self, state: State, job: Job) -> Written:
        written = Written(self._write(state, job, self._given_up), perf_counter())
        remove_replaced(job.replaces)
        return written

    def _process_ready(self) -> bool:
        """True once the process is there; starts it when the time has come, also while a save is under way: with
        a slow disk and spare buffers there may always be one. In place of one that is gone it starts another."""
        young = self._start_after is None or monotonic() - self._born < self._start_after
        in_use = any(task.written.process and not task.written.done() for task in self._tasks)
        if not young and not in_use and self._starts < STARTS and not self._process_lives():
            self.start_process()
        return self.process is not None and self.process.ready

    def _process_lives(self) -> bool:
        return self.process is not None and self.process.alive


_open: set[Saver] = set()


@atexit.register
def _end_all() -> None:
    """torch aborts the interpreter when a thread is still writing while it exits."""
    for saver in list(_open):
        if saver.abandon(EXIT_SECONDS) == "given up":
            logger.warning("a checkpoint was given up at the interpreter's exit; older ones are intact")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open.clear)  # the threads and the process are the parent's
