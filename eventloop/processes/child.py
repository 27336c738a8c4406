"""Start a child process, send it messages, read its answers and end it.

Only `exchange` and `end` wait for the child. The thread of a subscriber with `offload="process"` owns a
child (`eventloop.background.workers`), and so does the thread that saves checkpoints
(`eventloop.checkpoint.saving`).
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
from eventloop.processes.launch import Home, command, signals_blocked

PIPE_BYTES = 1 << 20
"""The size of the kernel's buffer of a pipe in bytes. An image fits in, so one write suffices for it."""
END_SECONDS = 2.0
"""Seconds that a worker may take to exit after it has announced its end, or was killed."""
_MOST_BUFFERS = 64  # messages in one system call


class ChildProcess:
    """Own a child process and the two pipes to it.

    The child runs a new interpreter: it is not a fork, and does not run the program's main script. One thread
    calls all methods, except `kill`, which any thread may call.

    Args:
        command: returns the command line, given the file descriptor to which the child writes its answers.
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
            with signals_blocked():
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
        self._unsent: deque[memoryview] = deque()
        self.backlog = 0  # bytes in `_unsent`, which wait for room in the pipe
        self.gone = False  # whether no more answers will come
        _live.add(self)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def push(self, *messages: bytes) -> None:
        """Queue messages, and write as much as the pipe takes without waiting; `exchange` writes the rest."""
        for message in messages:
            self._unsent.append(memoryview(message))
            self.backlog += len(message)
        self._write()

    def exchange(self, seconds: float | None, wake: int | None = None) -> list[Frame]:
        """Wait until an answer arrives, the pipe has room for unsent messages, or `wake` has a byte.

        Write unsent messages, and return the answers, which may be none. Set `gone` if no more will come.

        Args:
            seconds: the longest wait in seconds; None for no limit.
            wake: a file descriptor that another thread writes to in order to end the wait; its bytes are
                dropped.
        """
        dead = self._process.poll() is not None  # read first: a dead process's answers are all in the pipe
        poll = select.poll()  # `select` refuses descriptors above 1023, and a fork would share an `epoll`
        if wake is not None:
            poll.register(wake, select.POLLIN)
        poll.register(self._answers, select.POLLIN)
        if self._unsent:
            poll.register(self._commands, select.POLLOUT)
        ready = dict(poll.poll(None if seconds is None else max(0, int(seconds * 1e3) + 1)))
        self._write()
        if wake is not None and wake in ready:
            os.read(wake, 4096)
        if self._answers not in ready:
            # the pipe of a dead child may not end, because a process that the child has forked holds it open
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
            patience: the seconds in which the process may exit by itself before it is killed. As long as it
                uses the CPU, it gets as many seconds again and again.
        """
        if self._commands >= 0:
            _live.discard(self)
            pipes, self._commands, self._answers = (self._commands, self._answers), -1, -1
            for pipe in pipes:
                os.close(pipe)
        code = self._wait(patience)
        if code is None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # it does not die while it hangs in the disk
                self._process.wait(END_SECONDS)
            code = self._process.returncode
        if code is not None and code < 0:
            with suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def _wait(self, patience: float) -> int | None:
        """Return the exit code, or None if the process has not used the CPU for `patience` seconds."""
        cpu_seconds = of_process(self.pid)
        while True:
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(patience)
            before, cpu_seconds = cpu_seconds, of_process(self.pid)
            if not patience or not computes(before, cpu_seconds, patience):
                return None

    def detach(self) -> None:
        """Close the pipes in a fork of this process; the child belongs to the parent.

        If the fork kept the pipes open, the child would not notice when the parent closes them.
        """
        os.close(self._commands)
        os.close(self._answers)
        self._process.returncode = 0  # so that `Popen` does not wait for a process that is not its child

    def _write(self) -> None:
        """Write as many unsent bytes as the pipe has room for now."""
        try:
            while self._unsent:
                buffers = [self._unsent[i] for i in range(min(len(self._unsent), _MOST_BUFFERS))]
                self._drop_sent(os.writev(self._commands, buffers))
        except BlockingIOError:
            return
        except OSError:  # the child has died; `exchange` notices that by the end of the other pipe
            self._unsent.clear()
            self.backlog = 0

    def _drop_sent(self, count: int) -> None:
        """Remove the first `count` bytes of the unsent messages."""
        self.backlog -= count
        while count:
            buffer = self._unsent.popleft()
            if count < len(buffer):
                self._unsent.appendleft(buffer[count:])
                return
            count -= len(buffer)


class WorkerProcess(ChildProcess):
    """Own a child process that runs the handler of a background subscriber.

    Args:
        home: the module path and the working directory of the child.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self, home: Home) -> None:
        worker, parent = "eventloop.background.workers.worker", str(os.getpid())
        super().__init__(lambda answers: command(worker, home, str(answers), parent), home.cwd)


_live: WeakSet[ChildProcess] = WeakSet()
"""The children of this process whose pipes are open."""


def _detach_all() -> None:
    for worker in list(_live):
        worker.detach()
    _live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_all)


def _enlarge(pipe: int) -> None:
    """Enlarge the buffer of a pipe, if the system allows it, so that fewer writes wait."""
    with suppress(ImportError, AttributeError, OSError):  # only Linux has this, with a limit for each user
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
