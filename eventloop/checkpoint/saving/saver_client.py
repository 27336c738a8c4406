"""Start the process that writes checkpoints, and send it work.

The saver uses it in the training process, `saver_process` uses its messages on the other side.
"""

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
"""Seconds that an idle process may take to end; it normally takes milliseconds."""
LOOK_SECONDS = 1.0
"""Seconds between two checks while waiting: for `kill` and `leave`, or for the parent's end."""
KILLED_SECONDS = 1.0
"""Seconds to wait for a killed process."""


class Job(NamedTuple):
    """The description of a save.

    Attributes:
        path: the checkpoint's path.
        label: the fields of the manifest that do not follow from the state.
        replaces: checkpoints to remove once this one is durable.
        awaited: whether the training waits until this one is durable.
    """

    path: Path
    label: Label = Label()
    replaces: tuple[Path, ...] = ()
    awaited: bool = False


class Written(NamedTuple):
    """The result of a save.

    Attributes:
        bytes: the size of the payload.
        at: the `perf_counter` when it was durable.
    """

    bytes: int
    at: float


class ProcessGoneError(RuntimeError):
    """The process died or could not save; a thread has to."""


class SaverProcess:
    """A worker process that writes checkpoints from shared memory.

    It is started afresh, not forked, and ends when this process does. One thread at a time may call `save`.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self) -> None:
        self._ready = self._killed = self._left = False
        self._sent: Layout | None = None  # the layout that was sent last
        reader, writer = _pipe()
        try:
            # the process holds `reader` too, so that an answer without a reader does not end it by SIGPIPE
            with signals_held():
                self._process = subprocess.Popen(
                    command("eventloop.checkpoint.saving.saver_process", Home.here(), str(writer)),
                    pass_fds=[reader, writer], stdin=subprocess.PIPE,
                )  # fmt: skip
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self._answers = os.fdopen(reader, "rb")

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        """Return whether it runs; False after `kill`, even while the disk still blocks its end."""
        return not self._killed and self.exit_code is None

    @property
    def left(self) -> bool:
        """Return whether `leave` was called: the process then finishes its save and ends by itself."""
        return self._left

    @property
    def ready(self) -> bool:
        """Return whether it has imported its modules and is alive."""
        return self.wait_ready(0)

    def wait_ready(self, timeout: float) -> bool:
        """Wait for at most `timeout` seconds until the process is ready; return whether it is."""
        if not self._ready and self.alive and wait_for(self._answers.fileno(), select.POLLIN, timeout):
            self._ready = receive(self._answers) == "ready"
        return self._ready and self.alive

    def save(self, packed: Packed, job: Job, timeout: float = inf) -> Written:
        """Let the process write a state, and wait for the result.

        A process that has not answered after `timeout` seconds is killed, unless `leave` was called.

        Raises:
            ProcessGoneError: the process died, was killed, or could not save; the cause has the reason.
        """
        until = monotonic() + timeout
        try:
            layout = None if packed.layout is self._sent else packed.layout
            self._send((packed.structure, layout, job), until)
            self._sent = packed.layout
            answered = self._answered(until)
            answer = receive(self._answers) if answered else None
        except (OSError, ValueError) as error:  # ValueError: its pipes were closed meanwhile
            raise ProcessGoneError("it has ended") from error
        if not answered:
            self.kill()
            raise ProcessGoneError(f"it had not answered after {timeout:.1f} s, and was killed")
        if answer is None:
            raise ProcessGoneError("it died")
        if isinstance(answer, Exception):
            raise ProcessGoneError(str(answer)) from answer
        written: Written = answer
        return written

    def kill(self) -> None:
        """Kill the process, on any thread; a running `save` raises ProcessGoneError."""
        self._killed = True
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # it may wait for a disk that hangs, without end
            self._process.wait(KILLED_SECONDS)

    def close(self) -> None:
        """End the idle process; kill it if it is still importing, or is stopped."""
        given_nothing = not self.ready
        self.leave()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if given_nothing else EXIT_SECONDS)
        if self.exit_code is None:
            self.kill()
        self._answers.close()

    def _answered(self, until: float) -> bool:
        """Wait for an answer until a time, or without a limit after `leave`; return whether there is one."""
        remaining = until - monotonic()
        while not wait_for(self._answers.fileno(), select.POLLIN, min(LOOK_SECONDS, remaining)):
            remaining = inf if self._left else until - monotonic()
            if self._killed or remaining <= 0.0:
                return False
        return True

    def _send(self, message: object, until: float) -> None:
        """Send a message until a time, because a stopped process does not read."""
        assert self._process.stdin is not None
        pipe, rest = self._process.stdin.fileno(), memoryview(framed(message))
        os.set_blocking(pipe, False)
        while rest and wait_for(pipe, select.POLLOUT, until - monotonic()):
            rest = rest[os.write(pipe, rest) :]

    def leave(self) -> None:
        """Let the process end by itself after its save, without waiting for it."""
        self._left = True
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            os.set_blocking(stdin.fileno(), False)  # a process that hangs does not read
            with suppress(
                OSError
            ):  # closing is not enough, because a forked loader worker may hold the pipe too
                send(stdin, None)
            with suppress(OSError):
                stdin.close()


def _pipe() -> tuple[int, int]:
    """Make a pipe whose ends have numbers above 2, because a program may have closed its standard streams."""
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
    """Wait until a pipe can be read or written, or its other end is closed; return False after `seconds`.

    It uses `poll`, because `select` refuses descriptors above 1023, and loaders that share tensors have more
    open.
    """
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(max(0.0, min(seconds * 1000.0, 2**31 - 1))))


def framed(message: object) -> bytes:
    """Return a pickled message with its length before it."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def send(stream: IO[bytes] | None, message: object) -> None:
    """Write one message to a stream, and flush it."""
    assert stream is not None
    stream.write(framed(message))
    stream.flush()


def receive(stream: IO[bytes] | FileIO) -> Any:
    """Read one message; return None at the end of the stream, also in the middle of a message.

    None as a message also means the end. Messages are pickled: use it only between this process and its own
    child.
    """
    head = _read(stream, _LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = _read(stream, length)
    return pickle.loads(body) if len(body) == length else None


def _read(stream: IO[bytes] | FileIO, size: int) -> bytearray:
    """Read `size` bytes, or fewer at the end of the stream; an unbuffered stream returns them in pieces."""
    read = bytearray()
    while len(read) < size and (piece := stream.read(size - len(read))):
        read += piece
    return read
