"""The thread that writes checkpoints, until one is given up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, BinaryIO

import torch

from eventloop.checkpoint import Serialized

Written = tuple[int, float]
"""Bytes, and the `perf_counter` when they were durable."""

PIECE = 4 << 20
"""Bytes between two looks whether a save was given up."""


class SaverThread:
    """A thread that writes. It is a daemon, so that one whose disk hangs can be left behind: the threads of an
    executor are joined at the interpreter's exit."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[tuple[Future[Written], Callable[[], Written]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="eventloop checkpoint", daemon=True)
        self._thread.start()

    def save(self, write: Callable[[], Written]) -> Future[Written]:
        """Let the thread write."""
        written: Future[Written] = Future()
        self._todo.put((written, write))
        return written

    def end(self, timeout: float | None = None) -> None:
        """End the thread once it is done; do not wait for it longer than `timeout` seconds."""
        self._todo.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (job := self._todo.get()) is not None:
            settle(job[0], attempt(job[1]))
            job = None  # it holds the copy that was written


class SaveGivenUp(RuntimeError):
    """Nobody waits for this save any more."""


class InPieces(Serialized):
    """A checkpoint that `torch.save` writes in pieces, until it is given up.

    The interpreter aborts when it exits while a thread is inside `torch.save`: the end of a Python thread there
    meets C++ that does not expect it. So whoever leaves a save behind has to get the thread out of it first.

    Args:
        given_up: set by whoever no longer waits.
    """

    def __init__(self, checkpoint: Mapping[str, Any], given_up: threading.Event) -> None:
        self._checkpoint = checkpoint
        self._given_up = given_up

    def write(self, file: BinaryIO) -> None:
        """Write it.

        Raises:
            SaveGivenUp: nobody waits for it any more.
        """
        try:
            torch.save(dict(self._checkpoint), _Pieces(file, self._given_up))  # type: ignore[arg-type]
        except RuntimeError as error:  # torch's own complaint, that its file is too short
            if self._given_up.is_set():
                raise SaveGivenUp from error
            raise


class _Pieces:
    """What `torch.save` needs of a file. It writes a storage in one call: for an optimizer that can be gigabytes."""

    def __init__(self, file: BinaryIO, given_up: threading.Event) -> None:
        self._file = file
        self._given_up = given_up

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        for start in range(0, len(view), PIECE):
            if self._given_up.is_set():
                raise SaveGivenUp
            self._file.write(view[start : start + PIECE])
        return len(view)

    def flush(self) -> None:
        self._file.flush()


def attempt(write: Callable[[], Written]) -> Written | Exception:
    """What `write` returns, or raises."""
    try:
        return write()
    except Exception as error:
        return error


def settle(written: Future[Written], answer: Written | Exception) -> None:
    """Give a future its result, or its error."""
    if isinstance(answer, Exception):
        written.set_exception(answer)
    else:
        written.set_result(answer)
