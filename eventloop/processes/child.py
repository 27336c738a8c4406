"""The program's end of a worker process: started, fed, read and ended, and never waited for."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections import deque
from contextlib import suppress
from weakref import WeakSet

from eventloop.processes.channel import Frame, Inbox
from eventloop.processes.launch import Home, command, signals_held

PIPE_BYTES = 1 << 20
"""What the kernel may hold for the worker: an image fits, and is not handed over in a dozen wake-ups."""
END_SECONDS = 2.0
"""How long a worker that said goodbye may take to exit."""
_PIECES = 64


class WorkerProcess:
    """A child process and two pipes. It is no fork, and does not run the program's main script: it knows what it is
    sent. All methods but `kill` are for one thread.

    Args:
        home: where it starts.

    Raises:
        OSError: no process could be started.
    """

    def __init__(self, home: Home) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        os.set_blocking(self._commands, False)
        _enlarge(self._commands)
        try:
            with signals_held():
                self._process = subprocess.Popen(
                    command("eventloop.background.workers.worker", home, str(answers), str(os.getpid())),
                    stdin=commands, pass_fds=[answers], cwd=home.cwd,
                )  # fmt: skip
        except BaseException:
            os.close(self._commands)
            os.close(self._answers)
            raise
        finally:
            os.close(commands)
            os.close(answers)
        self._inbox = Inbox(self._answers)
        self._out: deque[memoryview] = deque()
        self.backlog = 0  # bytes that the pipe had no room for yet
        self.gone = False  # it will answer no more
        _live.add(self)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def push(self, *messages: bytes) -> None:
        """Send messages, as soon as there is room for them."""
        for message in messages:
            self._out.append(memoryview(message))
            self.backlog += len(message)
        self._write()

    def exchange(self, seconds: float | None, wake: int) -> list[Frame]:
        """Wait for answers, for room to send what is left, or for a byte on `wake`; returns the answers."""
        dead = self._process.poll() is not None  # and has said all it had to say
        poll = select.poll()  # unlike select, for any descriptor; unlike epoll, not shared with a fork
        poll.register(wake, select.POLLIN)
        poll.register(self._answers, select.POLLIN)
        if self._out:
            poll.register(self._commands, select.POLLOUT)
        ready = dict(poll.poll(None if seconds is None else max(0, int(seconds * 1e3) + 1)))
        self._write()
        if wake in ready:
            os.read(wake, 4096)
        if self._answers not in ready:
            # whom the handler has forked may hold the pipe that a dead worker answers no more on
            self.gone = dead
            return []
        self.gone = not self._inbox.read()
        return [*self._inbox.frames()]

    def kill(self) -> None:
        """End it now; from any thread."""
        self._process.kill()

    def end(self, patience: float = 0.0) -> str:
        """Let go of it, and kill it if it does not end by itself; returns how it ended."""
        if self._commands >= 0:
            _live.discard(self)
            os.close(self._commands)
            os.close(self._answers)
            self._commands = self._answers = -1
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # in the middle of a read from a dead disk
                self._process.wait(END_SECONDS)
            code = self._process.returncode
        if code is not None and code < 0:
            with suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def leave_to_parent(self) -> None:
        """In a forked child: the worker is the parent's, and would not see the end of a pipe that is held here."""
        os.close(self._commands)
        os.close(self._answers)
        self._process.returncode = 0

    def _write(self) -> None:
        try:
            while self._out:
                pieces = [self._out[i] for i in range(min(len(self._out), _PIECES))]
                self._sent(os.writev(self._commands, pieces))
        except BlockingIOError:
            return
        except OSError:  # it has died, which its answers tell
            self._out.clear()
            self.backlog = 0

    def _sent(self, count: int) -> None:
        self.backlog -= count
        while count:
            piece = self._out.popleft()
            if count < len(piece):
                self._out.appendleft(piece[count:])
                return
            count -= len(piece)


_live: WeakSet[WorkerProcess] = WeakSet()


def _leave_all() -> None:
    for worker in list(_live):
        worker.leave_to_parent()
    _live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)


def _enlarge(pipe: int) -> None:
    with suppress(ImportError, AttributeError, OSError):  # Linux, up to its limit for a user
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
