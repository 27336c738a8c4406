"""The process that forks the scripts of `tests.forked`; it imports what takes long, and starts no thread."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import NamedTuple

NUMBER = struct.Struct("i")
"""What is told of a process: its id, later its exit code."""
_MESSAGE = 1 << 17
"""Bytes of the longest request."""
_TAKE_LONG = ("torch._dynamo", "sklearn.datasets")
"""The first one is what torch imports for the first optimizer."""


class Request(NamedTuple):
    """What is to be run."""

    arguments: list[str]
    cwd: str
    env: dict[str, str]


def serve() -> CodeType:
    """The server's loop: a fork for each request, until there will be no more. It returns in what it forked, with
    what that has to run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests end it
    control = socket.socket(fileno=os.dup(0))
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready, _, _ = select.select([control.fileno(), *running], [], [])
        for pidfd in running.keys() & set(ready):
            pid, status = running.pop(pidfd)
            os.close(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with status, suppress(OSError):  # nobody may want to know
                status.sendall(NUMBER.pack(code))
        if control.fileno() in ready:
            message, fds, _, _ = socket.recv_fds(control, _MESSAGE, 4)
            if not message:
                os._exit(0)
            for module in _TAKE_LONG:  # at the first request: most files of tests have none
                with suppress(ImportError):
                    importlib.import_module(module)
            status = socket.socket(fileno=fds.pop())
            if not (pid := os.fork()):
                for left in (control, status, *(other for _, other in running.values())):
                    left.close()
                for fd in running:
                    os.close(fd)
                return _become(pickle.loads(message), fds)
            status.sendall(NUMBER.pack(pid))
            running[os.pidfd_open(pid)] = pid, status
            for fd in fds:
                os.close(fd)


def _become(request: Request, streams: list[int]) -> CodeType:
    """Be as an interpreter that has just been started so."""
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "triton" not in sys.modules:  # the bindings of 3.9 print what of theirs is left at the end
        # the last one: at its end an interpreter would walk all of torch, several times
        atexit.register(gc.freeze)
    ours = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    theirs = list(filter(None, request.env.get("PYTHONPATH", "").split(os.pathsep)))
    how, *rest = request.arguments
    first = {"-c": "", "-m": request.cwd}.get(how, os.path.dirname(os.path.abspath(how)))
    sys.path[:] = [first, *theirs, *(entry for entry in sys.path if entry not in ours)]
    if how == "-c":
        sys.argv[:] = [how, *rest[1:]]
        return compile(rest[0], "<string>", "exec")
    if how == "-m":
        sys.argv[:] = rest
        start = f"__import__('runpy').run_module({rest[0]!r}, run_name='__main__', alter_sys=True)"
        return compile(start, "<string>", "exec")
    sys.argv[:] = [how, *rest]
    vars(sys.modules["__main__"])["__file__"] = os.path.abspath(how)
    return compile(Path(how).read_bytes(), how, "exec")
