"""Scripts for tests, run in processes that need not import torch: a clean process has imported it, and forks them.

    ran = forked.run(["-c", "import sys; print(sys.argv)", "x"], cwd=tmp_path)
    process = Forked(["-m", "eventloop", "demo"], cwd=tmp_path, stdout=subprocess.PIPE)

What is forked is a process of its own, with its own arguments, environment, streams and module search path, and the
signal handlers of a new interpreter. It leaves the server's loop for the top level of `__main__`, so that the
interpreter itself ends it: threads are joined, exit functions run, an exception is printed, a Ctrl-C becomes a death
by SIGINT. The server has one thread, and none of eventloop: that is imported by the script.

It is not for what an interpreter reads when it starts (`-W`, `-X`, PYTHONHASHSEED), for tests of what is imported,
for terminals, nor for programs that need no torch. torch has one thread. Where a system has no `os.pidfd_open`, an
interpreter is started as ever.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fork_server import NUMBER, Request

ROOT = str(Path(__file__).resolve().parents[1])


class Forked(subprocess.Popen[str]):
    """A `Popen` whose process is forked: `arguments` are the interpreter's, `-c program ...`, `-m module ...` or
    `script ...`.

    Raises:
        RuntimeError: the server is gone.
    """

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        super().__init__(
            [sys.executable, *arguments],
            cwd=cwd,
            env=env,
            text=True,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
        )

    if hasattr(os, "pidfd_open"):  # who starts the process, and who tells of its end, is all that differs

        def _execute_child(self, args: Any, *options: Any) -> None:
            cwd, env, streams = options[4], options[5], options[9:15]
            environment = dict(os.environ if env is None else env)
            request = Request([os.fspath(a) for a in args[1:]], os.fspath(cwd or os.getcwd()), environment)
            self._status, its_end = socket.socketpair()
            given = [streams[0], streams[3], streams[5]]
            fds = [own if fd == -1 else fd for own, fd in enumerate(given)]
            with its_end:
                socket.send_fds(_server().control, [pickle.dumps(request)], [*fds, its_end.fileno()])
            vars(self)["_child_created"] = True
            self.pid = self._received_status()
            getattr(self, "_close_pipe_fds")(*streams)  # noqa: B009  # Popen's own

        def _internal_poll(self, *_: Any, **__: Any) -> int | None:
            with suppress(subprocess.TimeoutExpired):
                self._wait(0)
            return self.returncode

        def _wait(self, timeout: float | None) -> int:
            if self.returncode is None:
                if not select.select([self._status], [], [], timeout and max(0.0, timeout))[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                self.returncode = self._received_status()
                self._status.close()
            return self.returncode

        def _received_status(self) -> int:
            message = self._status.recv(NUMBER.size)
            if not message:
                raise RuntimeError("the server that forks the tests' scripts is gone")
            return int(NUMBER.unpack(message)[0])


def run(
    arguments: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = 120,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with its output captured, forked."""
    with Forked(arguments, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class _Server:
    def __init__(self) -> None:
        self.control, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
        with its_end:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", "exec(__import__('tests.fork_server').fork_server.serve())"],
                stdin=its_end.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )


_servers: list[_Server] = []


def _server() -> _Server:
    if not _servers:
        _servers.append(_Server())
    return _servers[0]


def end() -> None:
    """End the server, if there is one."""
    while _servers:
        server = _servers.pop()
        with (
            server.control
        ):  # a closed one would be no end: what pytest forked, as loader workers are, has it too
            server.control.shutdown(socket.SHUT_RDWR)
        server.process.wait()
