"""Save checkpoints in the background, so that the training thread waits only for a copy.

`CheckpointHook` uses it, through `retention.pending`. A save has three stages:

1. Copy. Small states and values that may change at any time are copied at once; the parameters and the
   optimizer's state are copied during the next forward and backward pass (`Rest`).
2. Serialise, hash and write. A thread would take the GIL from the training thread, so a process does this,
   from the copy in shared memory. The process needs seconds to import torch, so it is started only after the
   run has lasted a while. Until it is ready, and where it cannot be started, a thread writes.
3. Remove the checkpoints that the new, durable one replaces.
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
from eventloop.checkpoint.saving.save_timeout import SavePromise, SaveTimeouts
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
"""A function that writes durably, returns the bytes, and raises SaveGivenUp once the event is set."""

START_AFTER_SECONDS = 3.0
"""Age of a saver from which on a save starts the process."""
STARTS = 4
"""Times that the process is started; a process that dies again and again is not started any more."""
SMALL = 1 << 20
FEW = 100
"""Bytes and number of tensors up to which a state is serialised at once, on the training thread.

This holds for CPU tensors while no process is ready. torch takes 20 us for each tensor, ten times as long as
a copy of it.
"""
AT_ONCE = 8 << 20
"""Bytes of tensors up to which everything is copied at once, which takes about a millisecond."""
AT_ONCE_SECONDS = 0.1
"""Seconds that `abandon` waits for a running save; most are done by then."""
EXIT_SECONDS = 10.0
"""Seconds that the interpreter's exit waits for the save of an open saver, as long as for a bus."""

Left = Literal["", "given up", "process"]
"""The results of `Saver.abandon`: no save is left, one was cancelled, or the process finishes one."""


class SaveReplacedError(RuntimeError):
    """A newer state replaced this one before it was written."""


class ReplacedIfDurable(NamedTuple):
    """The checkpoints that a save removes also, if the save before it became durable.

    Attributes:
        former: the promise of the save before.
        replaces: the paths to remove.
    """

    former: Promise[Written]
    replaces: tuple[Path, ...]


class _Task:
    """One running save: its job, its copy, and the promise of its result."""

    def __init__(
        self,
        job: Job,
        written: SavePromise,
        copy: Packed | State,
        snapshot: Snapshot | None,
        also: ReplacedIfDurable | None,
    ) -> None:
        self.job, self.written, self.copy, self.snapshot, self._also = job, written, copy, snapshot, also
        self.begun = threading.Event()
        """Set once the save is being written; from then on it cannot be replaced."""

    @property
    def rest(self) -> Rest | None:
        """Return the part of the copy that is made late, if there is one."""
        return self.copy.rest if isinstance(self.copy, Packed) else None

    def settled_job(self) -> Job:
        """Return the job with all paths to remove. Called when the save before is done."""
        if self._also is None or self._also.former.exception() is not None:
            return self.job
        return self.job._replace(replaces=(*self.job.replaces, *self._also.replaces))


def _from_root(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Return absolute paths, because the program or its process may change the working directory."""
    return tuple(path.absolute() for path in paths)


class Saver:
    """The background saver of one hook: it copies a state now or soon, and makes it durable later.

    Public methods are called on the training thread, except where the interpreter's exit abandons a saver.

    Args:
        write: the function that the thread writes with.
        start_after: the age in seconds from which on a save starts the process; None never starts it.
        spare: keep a second set of buffers, so that a state can be copied while another is being written. The
            copied one waits, and a newer one replaces it. Without spare buffers the save before must be done.
    """

    def __init__(
        self, write: Write, *, start_after: float | None = START_AFTER_SECONDS, spare: bool = False
    ) -> None:
        self._write = write
        self._start_after = start_after
        self._born = monotonic()
        self._snapshots = [Snapshot() for _ in range(2 if spare else 1)]
        self._shared = False  # whether the snapshots are in shared memory
        self._copier: SaverThread | None = None
        self._writer: SaverThread | None = None
        self._tasks: list[_Task] = []  # running saves; the first one is being written
        self._lock = threading.Lock()  # held to decide whether a task is written or replaced
        self._given_up = threading.Event()
        self._timeouts = SaveTimeouts()
        self._starts = 0
        self.process: SaverProcess | None = None

    def save(
        self,
        state: Mapping[str, Any],
        job: Job,
        *,
        later: Callable[[], Collection[int]] | None = None,
        also: ReplacedIfDurable | None = None,
    ) -> Promise[Written]:
        """Copy a state and start writing it; once it is durable, remove what it replaces.

        Args:
            state: the state to save.
            job: the path, the label and the checkpoints to remove.
            later: called for a large state; returns the `data_ptr` of tensors that may be copied after this
                call. The caller calls `join` before they change.
            also: checkpoints to remove if the save before becomes durable.

        Returns:
            The promise of the result; also an error of the copy is raised by the promise.

        Raises:
            RuntimeError: the save before is running, and there are no spare buffers.
        """
        _open.add(self)
        self._make_room()
        self._writer = self._writer or SaverThread("checkpoint")
        written = SavePromise(job.path, self._timeouts)
        try:
            job = job._replace(path=job.path.absolute(), replaces=_from_root(job.replaces))
            also = also and also._replace(replaces=_from_root(also.replaces))
            task = _Task(job, written, *self._copy(state, written, later), also)
        except Exception as error:
            written.set_exception(
                error
            )  # no memory, or a kind of tensor that cannot be copied: a failed save
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
        """Return whether a save is running."""
        self._tasks = [task for task in self._tasks if not task.written.done()]
        return bool(self._tasks)

    def drop_waiting(self) -> None:
        """Drop the save that waits to be written; wait for it instead if its writing has begun by now."""
        if self.busy:
            for task in self._tasks[1:]:
                self._replace(task)

    def supersede(self) -> None:
        """Shorten the wait for running saves, because a newer state is saved next in a hurry.

        A save that its process does not finish in time is given up. A save that the training awaits is not
        affected.
        """
        for task in self._tasks:
            task.written.superseded = not task.job.awaited

    def join(self) -> None:
        """Wait until the tensors that are being copied may be changed."""
        for task in self._tasks:
            if task.rest is not None:
                task.rest.join()

    def close(self) -> None:
        """Wait for all saves, then end the threads and the process."""
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
        """Wait for running saves for at most `timeout` seconds, then leave them; return what was left.

        The process finishes its save alone. A thread cancels its save and removes the incomplete files; no
        other file is touched. The saver cannot be used afterwards.
        """
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
            # if the thread hangs, it will find nothing to rename later
            remove_unfinished(task.job.path, os.getpid())
        return "given up" if unwritten else ""

    def start_process(self) -> None:
        """Start the process, on a system with shared memory; later states are copied into shared buffers.

        Running saves are written from the former buffers, which are freed when these saves are done.
        """
        frozen = getattr(sys, "frozen", False)  # the executable of a frozen program is not Python
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
        self, state: Mapping[str, Any], written: SavePromise, later: Callable[[], Collection[int]] | None
    ) -> tuple[Packed | State, Snapshot | None]:
        """Copy a state; return the copy and its buffers, and set the size of the promise."""
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
        packed = private.pack(state, pointers)  # raises if the sharing was not the cause
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
        """Free the buffers of the save that waits to be written."""
        if self.busy and len(self._snapshots) < 2:
            raise RuntimeError("a save is running: wait for its promise, or make the Saver with spare=True")
        self.drop_waiting()

    def _free_snapshot(self) -> Snapshot:
        """Return buffers that no running save uses."""
        used = [task.snapshot for task in self._tasks if not task.written.done()]
        return next(snapshot for snapshot in self._snapshots if snapshot not in used)

    def _replace(self, task: _Task) -> None:
        """Replace a task that waits to be written; wait for it instead if its writing has begun."""
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
            self._timeouts.learn(task.written.size, written.at - began)
            task.written.set_result(written)

    def _attempt(self, task: _Task) -> Written:
        copy, job = task.copy, task.settled_job()
        if self._given_up.is_set():
            raise SaveGivenUp(f"{job.path} was given up")
        if not isinstance(copy, Packed):
            return self._write_here(copy, job)
        if copy.rest is not None:
            copy.rest.wait()
        # the process has the lowest priority: a save that the training awaits could take too long there
        process = self.process  # read once: another process may replace one that died
        if not job.awaited and process is not None and copy.layout.shared:
            task.written.process = process  # set first, because a process in use is not replaced
            try:
                if process.ready and not task.written.hurried:
                    return process.save(copy, job, self._timeouts.in_background(task.written.size))
            except ProcessGoneError as error:  # a thread tries next; only its error is reported
                if not task.written.superseded:
                    logger.warning(
                        "a checkpoint is written by a thread, because the process could not: %s", error
                    )
            for path in (job.path, *job.replaces):  # the process may have died while it removed one of them
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
        """Return whether the process is ready; start it if it is due, or a new one if it died.

        It is also started while a save is running, because with a slow disk and spare buffers one may always
        be.
        """
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
    """Abandon all savers at the interpreter's exit: torch aborts if a thread is still writing."""
    for saver in list(_open):
        if saver.abandon(EXIT_SECONDS) == "given up":
            logger.warning("a checkpoint was given up at the interpreter's exit; older ones are intact")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open.clear)  # the threads and the process are the parent's
