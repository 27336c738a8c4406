"""Writing checkpoints without holding up the training thread: on a thread first, then in a process.

`torch.save` is Python, and Python on a second thread takes the interpreter from the training thread: the save of a
1 MB state costs it 3 ms that way, more than the save itself. A process costs it the copy into shared memory. But a
process has to import torch, for seconds, so it is started only by a run that has lasted a while; until it is ready,
and wherever it cannot be had, the thread writes.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from time import monotonic, perf_counter
from typing import IO, Any, Literal

from eventloop.checkpoint import Serialized
from eventloop.saver_thread import InPieces, SaveGivenUp, SaverThread, Written, attempt, settle
from eventloop.snapshot import Layout, Packed, Snapshot, tensors_of

logger = logging.getLogger("eventloop")

Write = Callable[[Mapping[str, Any] | Serialized, Path], int]

START_AFTER_SECONDS = 3.0
"""Age of a saver from which a save starts the process."""
SMALL = 1 << 20
"""Bytes of tensors up to which a state is serialised on the training thread rather than on the writing thread."""
AT_ONCE_SECONDS = 0.1
"""How long a save that nobody waits for any more is waited for all the same: most are done by then."""
EXIT_SECONDS = 10.0
"""How long the interpreter's exit waits for a save whose saver nobody closed; as long as for a bus."""
_LENGTH = struct.Struct("<Q")

Left = Literal["", "given up", "process"]
"""What `Saver.abandon` left of a save: nothing, no file, or a process that finishes it alone."""


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
        self._thread: SaverThread | None = None
        self._under_way: tuple[Future[Written], Path, bool] | None = None  # True: a process has it
        self._given_up = threading.Event()
        self.process: SaverProcess | None = None

    def save(self, state: Mapping[str, Any], path: Path, replaces: Sequence[Path] = ()) -> Future[Written]:
        """Copy `state` and start writing it; once it is durable, remove the files it `replaces`.
        The save before must be done: its buffers are used again."""
        _open.add(self)
        process = self._ready_process(state)
        if process is not None:
            packed = self._snapshot.pack(state)
            written = process.save(
                packed, path, replaces, otherwise=lambda: self._write_now(packed.unpack(), path, replaces)
            )
        else:
            if self._thread is None:
                self._thread = SaverThread()
            copy = self._copy(state)
            written = self._thread.save(lambda: self._write_now(copy, path, replaces))
        self._under_way = written, path, process is not None
        return written

    def close(self) -> None:
        """Let the thread and the process go, after what they are writing."""
        if self._thread is not None:
            self._thread.end()
            self._thread = None
        if self.process is not None:
            self.process.close()
        _open.discard(self)

    def abandon(self, timeout: float = AT_ONCE_SECONDS) -> Left:
        """Let the thread and the process go, and wait for a save under way no longer than `timeout` seconds. A
        process then finishes it alone; a thread gives it up and removes what it wrote. No other file is touched.
        The saver is of no use afterwards."""
        _open.discard(self)
        if self._under_way is None:
            return ""
        written, path, by_process = self._under_way
        if not wait([written], timeout).not_done:
            by_process = False
        self._given_up.set()
        if self._thread is not None:
            self._thread.end(AT_ONCE_SECONDS)
        if self.process is not None:
            self.process.leave()
            if by_process and self.process.exit_code is None:
                return "process"
        if written.done() and not isinstance(written.exception(), SaveGivenUp):
            return ""
        remove_temporary(path)  # of a thread that hangs: it will find no file to rename
        return "given up"

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
        if self._given_up.is_set():
            raise SaveGivenUp(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(copy, Serialized):
            copy = InPieces(copy, self._given_up)
        written = self._write(copy, path), perf_counter()
        remove_files(replaces)
        return written

    def _ready_process(self, state: Mapping[str, Any]) -> SaverProcess | None:
        if self._start_after is None or monotonic() - self._born < self._start_after:
            return None
        if self.process is None:
            self.start_process(state)
        return self.process if self.process is not None and self.process.ready else None


_open: set[Saver] = set()


@atexit.register
def _end_all() -> None:
    """torch aborts the interpreter when a thread is still writing while it exits."""
    for saver in list(_open):
        if saver.abandon(EXIT_SECONDS) == "given up":
            logger.warning("a checkpoint was given up at the interpreter's exit; older ones are intact")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open.clear)  # the threads and the process are the parent's


class SaverProcess:
    """A worker that writes what lies in shared memory. It is no fork: it knows nothing of this process but what it
    is sent, and ends when this process does."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._pending: tuple[Future[Written], Callable[[], Written]] | None = None
        self._sent: Layout | None = None  # the layout that the process knows
        package = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
        reader, writer = os.pipe()
        with (
            _ctrl_c_held()
        ):  # it holds `reader` too: left alone, it must not die of an answer that nobody reads
            self._process = subprocess.Popen(
                [sys.executable, "-m", "eventloop.saver_process"], pass_fds=[reader],
                stdin=subprocess.PIPE, stdout=writer, env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        os.close(writer)
        self._answers = os.fdopen(reader, "rb")
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
        self.leave()
        self._reader.join()

    def leave(self) -> None:
        """Let the process end once it is done, without waiting for it."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            os.set_blocking(stdin.fileno(), False)  # one that hangs does not read
            with suppress(OSError):  # a forked loader worker may hold the pipe too, so its end would not do
                send(stdin, None)
            with suppress(OSError):
                stdin.close()

    def _read(self) -> None:
        with self._answers as answers:
            while (answer := receive(answers)) is not None:
                if answer == "ready":
                    self._ready.set()
                else:
                    self._answered(answer)
        self._ready.clear()
        self._answered(ConnectionError("the checkpoint process died"))
        self._process.wait()

    def _answered(self, answer: Written | Exception) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        written, otherwise = pending
        if isinstance(
            answer, Exception
        ):  # what the process cannot do, this one may; its error is the one that counts
            logger.warning("a checkpoint is written by a thread, because the process could not: %s", answer)
            answer = attempt(otherwise)
        settle(written, answer)


@contextmanager
def _ctrl_c_held() -> Iterator[None]:
    """What is started meanwhile is deaf to Ctrl-C, which reaches the whole group, from its first moment on: while it
    imports torch it would die of it, with a traceback on the terminal."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def remove_temporary(path: Path) -> None:
    """Remove what this process wrote of `path` under another name."""
    remove_files([*path.parent.glob(f".{escape(path.name)}.{os.getpid()}.*")])


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
