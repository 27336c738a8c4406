"""Start a child process, send it messages, read its answers and end it.

Nothing here waits for the child to do its work, except `exchange`. The thread of a subscriber with
`offload="process"` owns a child (`eventloop.background.workers`), and so does the thread that saves
checkpoints (`eventloop.checkpoint.saving`).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakSet

from eventloop.processes.channel import Frame, Inbox
from eventloop.processes.cpu_time import computes, of_process
from eventloop.processes.launch import Home, command, signals_held

PIPE_BYTES = 1 << 20
"""Size of the pipe's kernel buffer in bytes; an image fits, so the parent need not wake up many times."""
END_SECONDS = 2.0
"""The time in seconds within which a worker exits, or computes, that has announced its end or was killed."""
_PIECES = 64


class ChildProcess:
    """A child process and the two pipes to it.

    The child starts in a new interpreter: it is not a fork, does not run the program's main script, and knows
    only the messages that it receives. One thread calls all methods, except `kill`, which any thread may
    call.

    Args:
        command: makes the command line, given the file descriptor to which the child writes its answers.
        cwd: the working directory of the child; by default that of this process.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self, command: Callable[[int], list[str]], cwd: str | None = None) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        os.set_blocking(self._commands, False)
        _enlarge(self._commands)
        try:
            with signals_held():
                self._process = subprocess.Popen(
                    command(answers), stdin=commands, pass_fds=[answers], cwd=cwd
                )
        except BaseException:
            os.close(self._commands)
            os.close(self._answers)
            raise
        finally:
            os.close(commands)
            os.close(answers)
        self._inbox = Inbox(self._answers)
        self._out: deque[memoryview] = deque()
        self.backlog = 0  # bytes that wait for room in the pipe
        self.gone = False  # no more answers will come
        _live.add(self)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def push(self, *messages: bytes) -> None:
        """Queue messages, and write as much as the pipe takes at once; `exchange` writes the rest."""
        for message in messages:
            self._out.append(memoryview(message))
            self.backlog += len(message)
        self._write()

    def exchange(self, seconds: float | None, wake: int | None = None) -> list[Frame]:
        """Wait until an answer arrives, the pipe has room, or `wake` has a byte; return the answers.

        Sets `gone` when no more answers will come.

        Args:
            seconds: the longest wait; None for no limit.
            wake: a file descriptor that another thread writes to in order to end the wait; its bytes are
                dropped.
        """
        dead = self._process.poll() is not None  # then all its answers are in the pipe
        poll = select.poll()  # unlike select, for any descriptor; unlike epoll, not shared with a fork
        if wake is not None:
            poll.register(wake, select.POLLIN)
        poll.register(self._answers, select.POLLIN)
        if self._out:
            poll.register(self._commands, select.POLLOUT)
        ready = dict(poll.poll(None if seconds is None else max(0, int(seconds * 1e3) + 1)))
        self._write()
        if wake is not None and wake in ready:
            os.read(wake, 4096)
        if self._answers not in ready:
            # a process that the handler forked may still hold the pipe of a dead worker
            self.gone = dead
            return []
        self.gone = not self._inbox.read()
        return [*self._inbox.frames()]

    def kill(self) -> None:
        """Kill the process now; any thread may call it."""
        self._process.kill()

    def end(self, patience: float = 0.0) -> str:
        """Close the pipes, end the process, and return how it ended, e.g. `killed by SIGKILL`.

        Args:
            patience: the seconds in which the process may exit by itself, before it is killed. It has as long
                again while it computes.
        """
        if self._commands >= 0:
            _live.discard(self)
            pipes, self._commands, self._answers = (self._commands, self._answers), -1, -1
            for pipe in pipes:
                os.close(pipe)
        code = self._wait(patience)
        if code is None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # in disk I/O that hangs it does not die: stop waiting
                self._process.wait(END_SECONDS)
            code = self._process.returncode
        if code is not None and code < 0:
            with suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def _wait(self, patience: float) -> int | None:
        """Return the exit code, or None if the process has not computed for `patience` seconds."""
        used = of_process(self.pid)
        while True:
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(patience)
            before, used = used, of_process(self.pid)
            if not (patience and computes(before, used, patience)):
                return None

    def detach(self) -> None:
        """In a fork of this process, close the pipes and forget the child, which belongs to the parent.

        If the fork kept the pipes open, the child would not notice that the parent has closed them.
        """
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
        except OSError:  # the child has died, so the pipe of its answers ends, too
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


class WorkerProcess(ChildProcess):
    """A child process that runs the handler of a background subscriber.

    Args:
        home: the module path and the working directory of the child.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self, home: Home) -> None:
        worker, parent = "eventloop.background.workers.worker", str(os.getpid())
        super().__init__(lambda answers: command(worker, home, str(answers), parent), home.cwd)


_live: WeakSet[ChildProcess] = WeakSet()


def _detach_all() -> None:
    for worker in list(_live):
        worker.detach()
    _live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_all)


def _enlarge(pipe: int) -> None:
    with suppress(ImportError, AttributeError, OSError):  # Linux, up to its limit for a user
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
