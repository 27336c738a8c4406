"""Start the processes of `company`: what keeps the machine busy, and the trainings, each timed from outside.

Everything stays in the session of the benchmark, because Linux gives each session an equal share of the CPUs, however
many processes it has (`sched_autogroup_enabled`).
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Timer
from time import monotonic
from typing import Self

import msgspec

from benchmarks.helpers.company_job import Seen, Training, p99
from benchmarks.helpers.company_process import READY, Task

CPUS = os.cpu_count() or 1
LAST_WORDS = 600
"""Characters of a failed process's standard error that are kept."""
BUSY = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
sys.stdout.write("busy")
sys.stdout.flush()
while True:
    pass
"""
"""Keeps a CPU busy until its standard input ends, which it also does when the benchmark is killed."""


class Company(msgspec.Struct, frozen=True):
    """What is there beside a training."""

    text: str
    busy: int = 0
    """Processes that keep CPUs busy."""
    loader_workers: bool = False
    ranks: int = 1
    sharded: bool = False
    """Whether the ranks share a model, as FSDP2 divides it; by default each has its own."""


ALONE = "alone"
COMPANIES = {
    ALONE: Company("nothing else"),
    "busy1": Company("a busy process for each CPU", busy=CPUS),
    "busy2": Company("two busy processes for each CPU", busy=2 * CPUS),
    "loader": Company(
        "the training's own DataLoader, with a worker for each CPU that keeps it busy", loader_workers=True
    ),
    "ranks": Company("two gloo ranks, each a training process", ranks=2),
    "fsdp2": Company(
        "two gloo ranks, over which FSDP2 divides the model; by hand they call dcp.save, without the peers",
        ranks=2,
        sharded=True,
    ),
}


class Run(msgspec.Struct):
    """What one run took, in seconds; `began` is when it was told to begin, with everything imported."""

    whole: float
    """From there until its process, or that of its last rank, has ended."""
    start: float
    """Until the first step."""
    loop: float
    """From the beginning of the first step to that of the last one."""
    end: float
    """From the beginning of the last step until the process has ended."""
    p50: float
    p99: float
    longest: float
    save: float
    """Median time for which a save at the interval blocked the training thread, and for which a best one did."""
    best: float
    durable: float
    durable_longest: float
    lag: float
    lag_longest: float
    saves: int
    """Checkpoints that became durable."""
    loss: float

    @classmethod
    def of(cls, seen: Seen, began: float, ended: float) -> Self:
        """The figures of a run."""
        return cls(
            ended - began,
            seen.first - began,
            seen.last - seen.first,
            ended - seen.last,
            statistics.median(seen.steps),
            p99(seen.steps),
            max(seen.steps),
            middle(seen.saves),
            middle(seen.bests),
            middle(seen.durable),
            max(seen.durable, default=0.0),
            middle(seen.lags),
            max(seen.lags, default=0.0),
            len(seen.durable),
            seen.loss,
        )


class Failed(Exception):
    """A training failed, or was killed because it took too long; the text says why."""


def middle(values: list[float]) -> float:
    """The median, 0 of none."""
    return statistics.median(values) if values else 0.0


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep CPUs busy with so many processes; they have ended when the block has, however it ends."""
    with ExitStack() as stack:
        processes = [stack.enter_context(busy_process()) for _ in range(count)]
        for process in processes:
            assert process.stdout is not None
            process.stdout.read(1)
        yield


@contextmanager
def busy_process() -> Iterator[subprocess.Popen[bytes]]:
    """One process that keeps a CPU busy."""
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class Prepared:
    """A training whose processes have imported everything and wait; `run` lets them train once.

    Raises:
        Failed: a process could not be prepared.
    """

    def __init__(self, engine: str, training: Training, company: Company, folder: Path) -> None:
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []
        directory = self._stack.enter_context(
            tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True)
        )
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._stack.callback(self._errors.close)
        task = Task(engine, training, directory, company.loader_workers, company.sharded)
        command = [
            sys.executable,
            "-m",
            "benchmarks.helpers.company_process",
            msgspec.json.encode(task).decode(),
        ]
        port = free_port()
        for rank in range(company.ranks):
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    process_group=0,
                    env={**os.environ, **(torchrun(rank, company.ranks, port) if company.ranks > 1 else {})},
                )
            )

    def wait(self) -> None:
        """Wait until it is prepared.

        Raises:
            Failed: it is not.
        """
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.readline() != READY:
                raise Failed(f"ended before it was ready: {self._last_words()}")

    def run(self, limit: float) -> Run:
        """Let it train, and wait until it has ended.

        Raises:
            Failed: it ended with an error, or was killed after `limit` seconds.
        """
        timer = Timer(limit, self._kill)
        timer.start()
        try:
            began = monotonic()
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(b"go\n")
                process.stdin.flush()
            said = self._processes[0].stdout
            assert said is not None
            line = said.readline()
            codes = [process.wait() for process in self._processes]
            ended = monotonic()
        finally:
            timer.cancel()
        if ended - began >= limit:
            raise Failed(f"killed after {limit:g} s")
        if any(codes) or not line:
            raise Failed(f"ended with code {max(codes, key=abs)}: {self._last_words()}")
        return Run.of(msgspec.json.decode(line, type=Seen), began, ended)

    def close(self) -> None:
        """End what is left of it, and remove its files."""
        self._kill()
        for process in self._processes:
            process.communicate()
        self._stack.close()

    def _kill(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):  # with the processes that it started
                    os.killpg(process.pid, signal.SIGKILL)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip()[-LAST_WORDS:].splitlines()
        return lines[-1] if lines else "it said nothing"


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment variables that torchrun sets for a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "company",
        "GLOO_SOCKET_IFNAME": "lo",
    }
