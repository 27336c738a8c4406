"""Start an evaluator as a child process of a training, and start it again if it is killed.

`AsyncValidationHook` uses it on rank 0. All but `end` is called on a background thread.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from contextlib import suppress
from pathlib import Path

from eventloop.processes.launch import Home, command, signals_held
from eventloop.sidecar.reports import FOLDER

logger = logging.getLogger("eventloop")

LOG = "output.log"
"""The name of the file with what the evaluator prints, in its folder."""
MOST_RESTARTS = 3
"""How often a killed evaluator is started again without a result in between."""
END_SECONDS = 5.0
"""Seconds in which a killed process must be gone."""
_OF_A_JOB = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""The variables by which a program finds its other ranks; the evaluator is a program of one rank."""


class EvaluatorProcess:
    """An evaluator that follows a run, in a process of its own.

    Args:
        run: the directory of the run.
        build: the function that builds the trainer, as "module:function".
        device: its device; None for that of the function's trainer.
        threads: the number of PyTorch's threads.
    """

    def __init__(self, run: Path, build: str, device: str | None, threads: int) -> None:
        self._run, self._home = run.absolute(), Home.here()
        self._arguments = json.dumps([str(self._run), build, device, threads])
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts = 0
        self._ended = False
        self.failed = False
        """True once it has failed, and is not started again."""

    @property
    def pid(self) -> int | None:
        """Return the process id; None while no evaluator runs."""
        return None if self._process is None else self._process.pid

    def result_came(self) -> None:
        """Record that the evaluator gets on; it may be started again as often as at first."""
        self._restarts = 0

    def poll(self) -> None:
        """Start the evaluator if it does not run, unless it has failed; called every second."""
        if self._ended or self.failed:
            return
        if self._process is None:
            self._start()
        elif (code := self._process.poll()) is not None:
            self._process = None
            self._died(code)

    def _start(self) -> None:
        log = self._run / FOLDER / LOG
        try:
            log.parent.mkdir(exist_ok=True)
            with signals_held(), open(log, "ab") as output:
                self._process = subprocess.Popen(
                    command("eventloop.sidecar.program", self._home, self._arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self._home.cwd,
                    env={name: value for name, value in os.environ.items() if name not in _OF_A_JOB},
                )
        except OSError as error:
            self._fail(f"it could not be started: {error}")

    def _died(self, code: int) -> None:
        if code == 0:  # it found that the run had ended
            self._ended = True
        elif 0 < code < 128:
            self._fail(f"{self._last_line() or f'exit code {code}'} (more in {self._run / FOLDER / LOG})")
        elif self._restarts >= MOST_RESTARTS:
            self._fail(f"it was killed {self._restarts + 1} times without a result, the last time by {-code}")
        else:
            self._restarts += 1
            logger.warning("the evaluator of %s was killed (%d), and is started again", self._run, code)

    def _fail(self, why: str) -> None:
        self.failed = True
        logger.error(
            "checkpoints of %s are not validated from now on, and the training goes on: %s; once this is "
            "mended, `eventloop evaluate` validates those that are there",
            self._run,
            why,
        )

    def _last_line(self) -> str:
        with suppress(OSError):
            lines = (self._run / FOLDER / LOG).read_text(errors="replace").splitlines()
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""

    def end(self) -> None:
        """End the evaluator at once, on any thread; a later one validates the rest."""
        self._ended = True
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
