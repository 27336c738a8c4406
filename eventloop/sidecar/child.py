"""Start an evaluator as a child process of a training, and start it again if it is killed.

`AsyncValidationHook` uses it on rank 0. A background thread calls `poll` each second, and the training thread
calls `end`, perhaps while `poll` starts the process. A lock makes sure that no process is left behind then.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

from eventloop.processes.launch import Home, command, signals_blocked
from eventloop.sidecar.reports import FOLDER

logger = logging.getLogger("eventloop")

LOG = "output.log"
"""The name of the file, in the run's folder `evaluator`, with the output of the evaluator's process."""
MOST_RESTARTS = 3
"""How many times in a row an evaluator that was killed before its next result is started again."""
END_SECONDS = 5.0
"""The longest wait, in seconds, for a process that was killed."""
_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""The environment variables of a program of several ranks. They are kept from the evaluator."""


class EvaluatorProcess:
    """Run an evaluator that follows a run, in a process of its own.

    Args:
        run: the directory of the run.
        build: the function that builds the trainer, as "module:function".
        device: the device of the trainer; None for the device that the function chooses.
        threads: the number of PyTorch's threads in the process.
    """

    def __init__(self, run: Path, build: str, device: str | None, threads: int) -> None:
        self._run, self._home = run.absolute(), Home.here()
        self._arguments = json.dumps([str(self._run), build, device, threads])
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # one thread at a time starts, replaces or ends the process
        self._restarts = 0  # since the last result
        self._ended = False  # whether `end` was called, or the evaluator has seen the end of the run
        self.failed = False
        """True once the evaluator has failed. It is not started again."""

    @property
    def pid(self) -> int | None:
        """The process id; None while no evaluator runs."""
        process = self._process
        return None if process is None else process.pid

    def result_came(self) -> None:
        """Record that the evaluator has reported a result: the count of its restarts begins again at 0."""
        self._restarts = 0

    def poll(self) -> None:
        """Start the evaluator if it does not run and has not ended or failed. It is called every second."""
        with self._lock:
            if self._ended or self.failed:
                return
            if self._process is None:
                self._start()
            elif (code := self._process.poll()) is not None:
                self._process = None
                self._handle_exit(code)

    def _start(self) -> None:
        """Start the process with its output in a log file; it gets no variables of a launcher of ranks."""
        log = self._run / FOLDER / LOG
        try:
            log.parent.mkdir(exist_ok=True)
            with signals_blocked(), open(log, "ab") as output:
                self._process = subprocess.Popen(
                    command("eventloop.sidecar.program", self._home, self._arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self._home.cwd,
                    env={name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES},
                )
        except OSError as error:
            self._fail(f"it could not be started: {error}")

    def _handle_exit(self, code: int) -> None:
        """Decide by the exit code whether the evaluator is started again: only if a signal has killed it."""
        if code == 0:  # the evaluator has found that the run had ended
            self._ended = True
        elif 0 < code < 128:  # an error; other codes are those of signals
            self._fail(f"{self._last_line() or f'exit code {code}'} (more in {self._run / FOLDER / LOG})")
        elif self._restarts >= MOST_RESTARTS:
            self._fail(f"it was killed {self._restarts + 1} times without a result, the last time by {-code}")
        else:
            self._restarts += 1
            logger.warning("the evaluator of %s was killed (%d), and is started again", self._run, code)

    def _fail(self, reason: str) -> None:
        """Log that checkpoints are not validated any more, and let the training go on."""
        self.failed = True
        logger.error(
            "checkpoints of %s are not validated from now on, and the training goes on: %s; once this is "
            "mended, `eventloop evaluate` validates those that are there",
            self._run,
            reason,
        )

    def _last_line(self) -> str:
        """Return the last line in the log of the process, usually its error; "" without any."""
        with suppress(OSError):
            lines = (self._run / FOLDER / LOG).read_text(errors="replace").splitlines()
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""

    def end(self) -> None:
        """Kill the evaluator; any thread may call this. A later evaluator validates the other checkpoints."""
        with self._lock:
            self._ended = True
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
