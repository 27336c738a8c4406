"""Run engines in processes of their own that take turns: all exist at the same time, and one of them works.

    with Workers({"bare": Training("bare", size, 2), "Lightning": ...}) as workers:
        rounds = workers.take_turns(rounds=8, warm_up=3)      # {"bare": [{"mean": ...}, ...], "Lightning": ...}
        workers.failed                                        # {"Lightning": "ImportError: ..."}

A machine that others use too changes its speed within seconds, so what is compared is what stands in the same round.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Self

import msgspec

from benchmarks.helpers.engine_process import Task

Turn = dict[str, float]
"""What a process says of one turn; times in seconds, of a dispatch in nanoseconds."""
LAST_WORDS = 1_500
"""Characters of a dead process's standard error that are shown."""
CLOSE_SECONDS = 60.0


class Gone(Exception):
    """A worker process has failed; the text says why."""


class Worker:
    """One process; `answer` waits for its set-up, `ask` for a turn."""

    def __init__(self, task: Task) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.helpers.engine_process", msgspec.json.encode(task).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def ask(self) -> Turn:
        """Let it take a turn; waits for the end of it.

        Raises:
            Gone: it failed, or was killed.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its answer says why
            self._process.stdin.write(b"turn\n")
            self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Turn:
        """Wait for what it says.

        Raises:
            Gone: it failed, or was killed.
        """
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise Gone(f"ended with code {self._process.wait()}: {self.last_words()}")
        answer: dict[str, float | str] = msgspec.json.decode(line)
        if "failed" in answer:
            raise Gone(str(answer["failed"]))
        return {key: float(value) for key, value in answer.items()}

    def last_words(self) -> str:
        """The end of its standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-LAST_WORDS:].strip()

    def close(self) -> None:
        """End it, or kill it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


class Workers:
    """A process for each task, all set up one after the other; one that fails is named in `failed` and is gone."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._tasks = tasks
        self._workers: dict[str, Worker] = {}
        self.failed: dict[str, str] = {}

    def __enter__(self) -> Self:
        for name, task in self._tasks.items():
            self._workers[name] = worker = Worker(task)
            try:
                worker.answer()
            except Gone as error:
                self._fail(name, error)
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers.values():
            worker.close()

    def take_turns(self, rounds: int, warm_up: int) -> dict[str, list[Turn]]:
        """Let the processes take turns; return the turns of each by name.

        Each round begins with another process. The rounds of the warm-up are left out, and so is a process
        that failed.
        """
        taken: dict[str, list[Turn]] = {name: [] for name in self._workers}
        for number in range(-warm_up, rounds):
            names = [*self._workers]
            begin = number % len(names)
            for name in names[begin:] + names[:begin]:
                try:
                    turn = self._workers[name].ask()
                except Gone as error:
                    self._fail(name, error)
                    continue
                if number >= 0:
                    taken[name].append(turn)
        return {name: turns for name, turns in taken.items() if name in self._workers}

    def _fail(self, name: str, error: Gone) -> None:
        self.failed[name] = str(error)
        self._workers.pop(name).close()
