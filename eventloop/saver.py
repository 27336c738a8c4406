"""Writing checkpoints without holding up the training thread: on a thread first, then in a process.

`torch.save` is Python, and Python on a second thread takes the interpreter from the training thread: the save of a
1 MB state costs it 3 ms that way, more than the save itself. A process costs it the copy into shared memory. But a
process has to import torch, for seconds, so it is started only by a run that has lasted a while; until it is ready,
and wherever it cannot be had, the thread writes.
"""

from __future__ import annotations

import logging
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic, perf_counter
from typing import IO, Any

from eventloop.checkpoint import Serialized
from eventloop.snapshot import Layout, Packed, Snapshot, tensors_of

logger = logging.getLogger("eventloop")

Written = tuple[int, float]
"""Bytes, and the `perf_counter` when they were durable."""
Write = Callable[[Mapping[str, Any] | Serialized, Path], int]

START_AFTER_SECONDS = 3.0
"""Age of a saver from which a save starts the process."""
SMALL = 1 << 20
"""Bytes of tensors up to which a state is serialised on the training thread rather than on the writing thread."""
_LENGTH = struct.Struct("<Q")


class Saver:
    """Copies a state at once and makes it durable later; one save at a time.

    Args:
        write: how the thread writes; `save_checkpoint`.
        start_after: seconds from which on a process is worth its start; None never.
    """

    def __init__(self, write: Write, *, start_after: float | None = START_AFTER_SECONDS) -> None:
        self._write = write
        self._start_after = start_after
        self._born = monotonic()
        self._snapshot = Snapshot()
        self._executor: ThreadPoolExecutor | None = None
        self.process: SaverProcess | None = None

    def save(self, state: Mapping[str, Any], path: Path, replaces: Sequence[Path] = ()) -> Future[Written]:
        """Copy `state` and start writing it; once it is durable, remove the files it `replaces`.
        The save before must be done: its buffers are used again."""
        process = self._ready_process(state)
        if process is not None:
            packed = self._snapshot.pack(state)
            return process.save(
                packed, path, replaces, otherwise=lambda: self._write_now(packed.unpack(), path, replaces)
            )
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="eventloop checkpoint")
        copy = self._copy(state)
        return self._executor.submit(self._write_now, copy, path, replaces)

    def close(self) -> None:
        """Let the thread and the process go, after what they are writing."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
        if self.process is not None:
            self.process.close()

    def start_process(self, state: Mapping[str, Any]) -> None:
        """Start the process, where states like this one can be shared with one."""
        if not hasattr(os, "memfd_create") or any(t.is_cuda for t in tensors_of(state)):
            self._start_after = None  # no memory to share, or memory that a device cannot write to at speed
            return
        self._snapshot = Snapshot(shared=True)
        self.process = SaverProcess()

    def _copy(self, state: Mapping[str, Any]) -> Mapping[str, Any] | Serialized:
        tensors = list(tensors_of(state))
        if sum(t.nbytes for t in tensors) <= SMALL and not any(t.is_cuda for t in tensors):
            return Serialized(state)
        return self._snapshot.pack(state).unpack()

    def _write_now(
        self, copy: Mapping[str, Any] | Serialized, path: Path, replaces: Sequence[Path]
    ) -> Written:
        self._snapshot.wait()
        path.parent.mkdir(parents=True, exist_ok=True)
        written = self._write(copy, path), perf_counter()
        remove_files(replaces)
        return written

    def _ready_process(self, state: Mapping[str, Any]) -> SaverProcess | None:
        if self._start_after is None or monotonic() - self._born < self._start_after:
            return None
        if self.process is None:
            self.start_process(state)
        return self.process if self.process is not None and self.process.ready else None


class SaverProcess:
    """A worker that writes what lies in shared memory. It is no fork: it knows nothing of this process but what it
    is sent, and ends when this process does."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._pending: tuple[Future[Written], Callable[[], Written]] | None = None
        self._sent: Layout | None = None  # the layout that the process knows
        package = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "eventloop.saver_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, name="eventloop saver", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended, None while it runs."""
        return self._process.poll()

    @property
    def ready(self) -> bool:
        """True once it has imported what it needs, and while it lives."""
        return self._ready.is_set()

    def wait_ready(self, timeout: float) -> bool:
        """Wait for that."""
        return self._ready.wait(timeout)

    def save(
        self, packed: Packed, path: Path, replaces: Sequence[Path], otherwise: Callable[[], Written]
    ) -> Future[Written]:
        """Let the process write; when it dies over it, `otherwise` does, on the thread that notices."""
        written: Future[Written] = Future()
        self._pending = (written, otherwise)
        try:
            layout = None if packed.layout is self._sent else packed.layout
            send(self._process.stdin, (packed.structure, layout, path, list(replaces)))
            self._sent = packed.layout
        except OSError:
            self._answered(ConnectionError("the checkpoint process is gone"))
        return written

    def close(self) -> None:
        """End the process once it is done."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with suppress(OSError):  # a forked loader worker may hold the pipe too, so its end would not do
                send(stdin, None)
            with suppress(OSError):
                stdin.close()
        self._reader.join()
        self._process.wait()

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            while (answer := receive(stdout)) is not None:
                if answer == "ready":
                    self._ready.set()
                else:
                    self._answered(answer)
        self._ready.clear()
        self._answered(ConnectionError("the checkpoint process died"))

    def _answered(self, answer: Written | Exception) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        written, otherwise = pending
        if isinstance(
            answer, Exception
        ):  # what the process cannot do, this one may; its error is the one that counts
            logger.warning("a checkpoint is written by a thread, because the process could not: %s", answer)
            answer = _attempt(otherwise)
        if isinstance(answer, Exception):
            written.set_exception(answer)
        else:
            written.set_result(answer)


def _attempt(write: Callable[[], Written]) -> Written | Exception:
    try:
        return write()
    except Exception as error:
        return error


def remove_files(paths: Sequence[Path]) -> None:
    """Remove files; one that cannot be removed is named and left."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("a checkpoint that was replaced could not be removed: %s", error)


def send(stream: IO[bytes] | None, message: object) -> None:
    """Write one message."""
    assert stream is not None
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read one message; None says to end, and so does the end of the stream. Only ever between this process and its own child."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    body = stream.read(_LENGTH.unpack(head)[0])
    return pickle.loads(body)
