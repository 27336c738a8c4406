"""The process that writes checkpoints, seen from the one that trains."""

from __future__ import annotations

import os
import pickle
import select
import struct
import subprocess
from contextlib import suppress
from io import FileIO
from math import inf
from pathlib import Path
from time import monotonic
from typing import IO, Any, NamedTuple

from eventloop.checkpoint.manifest import Label
from eventloop.checkpoint.saving.snapshot import Layout, Packed
from eventloop.processes.launch import Home, command, signals_held

_LENGTH = struct.Struct("<Q")

EXIT_SECONDS = 5.0
"""How long a process that has nothing to do may take to end: one at rest takes milliseconds."""
LOOK_SECONDS = 1.0
"""How often who waits for an answer looks whether the process was killed, or left, and the process for its parent."""
KILLED_SECONDS = 1.0
"""How long one that was killed is waited for."""


class Job(NamedTuple):
    """What is to be saved: under which name, what its manifest says, and what it replaces once it is durable; and
    whether the training stands still until it is."""

    path: Path
    label: Label = Label()
    replaces: tuple[Path, ...] = ()
    awaited: bool = False


class Written(NamedTuple):
    """What was saved: bytes, and the `perf_counter` when they were durable."""

    bytes: int
    at: float


class ProcessGoneError(RuntimeError):
    """The process died, or cannot do what it was asked; somebody else has to."""


class SaverProcess:
    """A worker that writes what lies in shared memory. It is no fork: it knows nothing of this process but what it
    is sent, and ends when this process does. One thread at a time may talk to it.

    Raises:
        OSError: no process could be started.
    """

    def __init__(self) -> None:
        self._ready = self._killed = self._left = False
        self._sent: Layout | None = None  # the layout that the process knows
        reader, writer = _pipe()
        try:
            # it holds `reader` too: left alone, it must not die of an answer that nobody reads
            with signals_held():
                self._process = subprocess.Popen(
                    command("eventloop.checkpoint.saving.saver_process", Home.here(), str(writer)), pass_fds=[reader, writer],
                    stdin=subprocess.PIPE,
                )  # fmt: skip
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self._answers = os.fdopen(reader, "rb")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended, None while it runs."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        """False from `kill` on, also while the system holds the process in a disk's request."""
        return not self._killed and self.exit_code is None

    @property
    def left(self) -> bool:
        """True once nobody waits for it, and it ends by itself: what it was given is its own affair."""
        return self._left

    @property
    def ready(self) -> bool:
        """True once it has imported what it needs, and while it lives."""
        return self.wait_ready(0)

    def wait_ready(self, timeout: float) -> bool:
        """Wait for that."""
        if not self._ready and self.alive and wait_for(self._answers.fileno(), select.POLLIN, timeout):
            self._ready = receive(self._answers) == "ready"
        return self._ready and self.alive

    def save(self, packed: Packed, job: Job, timeout: float = inf) -> Written:
        """Let the process write, and wait for it; one that has not answered after `timeout` seconds is killed, unless it
        was left.

        Raises:
            ProcessGoneError: it died over it, or could not; the cause is why.
        """
        until = monotonic() + timeout
        try:
            layout = None if packed.layout is self._sent else packed.layout
            self._send((packed.structure, layout, job), until)
            self._sent = packed.layout
            answered = self._answered(until)
            answer = receive(self._answers) if answered else None
        except (OSError, ValueError) as error:  # ValueError: its pipes were closed meanwhile
            raise ProcessGoneError("it is gone") from error
        if not answered:
            self.kill()
            raise ProcessGoneError(f"it was killed, as it had not answered after {timeout:.1f} s")
        if answer is None:
            raise ProcessGoneError("it died")
        if isinstance(answer, Exception):
            raise ProcessGoneError(str(answer)) from answer
        written: Written = answer
        return written

    def kill(self) -> None:
        """End the process at once; any thread. What asks it to save gets a ProcessGoneError."""
        self._killed = True
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # of a disk that hangs it may be waiting for ever
            self._process.wait(KILLED_SECONDS)

    def close(self) -> None:
        """End the process, which has nothing to do. One that is still importing is not waited for, nor is one that does
        not end because it is stopped."""
        given_nothing = not self.ready
        self.leave()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if given_nothing else EXIT_SECONDS)
        if self.exit_code is None:
            self.kill()
        self._answers.close()

    def _answered(self, until: float) -> bool:
        """Wait for that; once it was left, without end."""
        remaining = until - monotonic()
        while not wait_for(self._answers.fileno(), select.POLLIN, min(LOOK_SECONDS, remaining)):
            remaining = inf if self._left else until - monotonic()
            if self._killed or remaining <= 0.0:
                return False
        return True

    def _send(self, message: object, until: float) -> None:
        """As `send`, to one that may not be reading."""
        assert self._process.stdin is not None
        pipe, rest = self._process.stdin.fileno(), memoryview(framed(message))
        os.set_blocking(pipe, False)
        while rest and wait_for(pipe, select.POLLOUT, until - monotonic()):
            rest = rest[os.write(pipe, rest) :]

    def leave(self) -> None:
        """Let the process end once it is done, without waiting for it."""
        self._left = True
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            os.set_blocking(stdin.fileno(), False)  # one that hangs does not read
            with suppress(OSError):  # a forked loader worker may hold the pipe too, so its end would not do
                send(stdin, None)
            with suppress(OSError):
                stdin.close()


def _pipe() -> tuple[int, int]:
    """A pipe, of which no end has the number of a standard stream: a program may have closed those."""
    ends: list[int] = []
    taken: list[int] = []
    try:
        while len(ends) < 2:
            taken += os.pipe()
            ends = taken[-2:] if min(taken[-2:]) > 2 else []
    finally:
        for end in taken:
            if end not in ends:
                os.close(end)
    return ends[0], ends[1]


def wait_for(descriptor: int, event: int, seconds: float) -> bool:
    """Whether a pipe can be read, or written, or has no other end any more, within so many seconds. Not by `select`: that
    takes no descriptor beyond 1023, and loaders that share tensors have more open."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(max(0.0, min(seconds * 1000.0, 2**31 - 1))))


def framed(message: object) -> bytes:
    """One message, behind its length."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def send(stream: IO[bytes] | None, message: object) -> None:
    """Write one message."""
    assert stream is not None
    stream.write(framed(message))
    stream.flush()


def receive(stream: IO[bytes] | FileIO) -> Any:
    """Read one message; None says to end, and so does the end of the stream, in the middle of a message too. Only ever
    between this process and its own child."""
    head = _read(stream, _LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = _read(stream, length)
    return pickle.loads(body) if len(body) == length else None


def _read(stream: IO[bytes] | FileIO, size: int) -> bytearray:
    """So many bytes, fewer at the end of the stream. One without a buffer gives them in pieces."""
    read = bytearray()
    while len(read) < size and (piece := stream.read(size - len(read))):
        read += piece
    return read
