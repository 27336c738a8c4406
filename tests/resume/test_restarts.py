"""Test that both ranks resume from one checkpoint at each restart, while a saver of the run before still saves."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.forked import ROOT, Forked

pytestmark = pytest.mark.slow

RESTARTS, KILLS = 100, 8
DEADLINE = 120.0
"""Seconds against hangs."""
LATE = 0.4
"""Seconds that rank 1, or the saver, comes late at most."""


@contextmanager
def started(script: str, rank: int, folder: Path, *arguments: object) -> Iterator[Forked]:
    """Start a script with its rank, and kill it in the end; its errors are in `errors-RANK`."""
    program = Path(__file__).with_name(script).read_text(encoding="utf-8")
    with open(errors_of(folder, rank), "w") as errors:  # a stopped saver would keep a pipe open
        process = Forked(
            ["-c", program, str(rank), *map(str, arguments)],
            cwd=folder,
            env={"PATH": "", "PYTHONPATH": ROOT, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=errors.fileno(),
        )
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE)
        process.stdout.close()


def errors_of(folder: Path, rank: int) -> Path:
    return folder / f"errors-{rank}"


def test_a_hundred_restarts_beside_a_saver(tmp_path: Path) -> None:
    """While another process completes and removes checkpoints, both ranks resume from the same bytes a hundred
    times, and where one finds no checkpoint, neither does."""
    (tmp_path / "run").mkdir()
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started("restarts_script.py", rank, tmp_path, "", RESTARTS))
            for rank in range(3)
        ]
        said = [process.communicate(timeout=2 * DEADLINE) for process in processes]

    for rank, process in enumerate(processes):
        assert process.returncode == 0, errors_of(tmp_path, rank).read_text()
    first, second = (json.loads(out) for out, _ in said[:2])
    assert len(first) == RESTARTS
    assert first == second
    assert len({found[0] for found in first}) > 2, "the saver has changed nothing between the restarts"


def line_of(process: Forked) -> Any:
    """Return what a rank says of its resume."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], DEADLINE)[0], "a rank says nothing of its resume"
    return json.loads(process.stdout.readline() or '["ended"]')


def savers_of(process: Forked) -> list[int]:
    """Return the child processes of a rank, as Linux lists them: that which writes the checkpoints."""
    tasks = Path(f"/proc/{process.pid}/task")
    return [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def await_another(run: Path, known: set[Path]) -> None:
    """Wait until the ranks have saved a checkpoint that was not there before."""
    wait_for(lambda: {*run.glob("iter_*")} - known)


def send(signum: signal.Signals, processes: list[int]) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's lists of child processes")
def test_ranks_killed_and_restarted_while_their_saver_lags(tmp_path: Path) -> None:
    """Both ranks are killed while the saver's process is stopped, it goes on while they restart, and one of them is
    late: they resume from one checkpoint each time, never from an older one than before."""
    times, run = random.Random(0), tmp_path / "run"
    savers: list[int] = []
    found: list[list[Any]] = []
    try:
        for number in range(KILLS):
            with ExitStack() as stack:
                late = times.uniform(0, LATE)
                rendezvous = tmp_path / f"rendezvous-{number}"
                ranks = [
                    stack.enter_context(started("killed_script.py", rank, tmp_path, rendezvous, late))
                    for rank in range(2)
                ]
                wait_for(Path(f"{rendezvous}-0").exists)  # rank 0 is about to resume
                time.sleep(times.uniform(0, late / 2))
                send(signal.SIGCONT, savers)
                found.append([line_of(rank) for rank in ranks])
                await_another(run, {*run.glob("iter_*")})
                savers = savers_of(ranks[0])
                send(signal.SIGSTOP, savers)
                time.sleep(0.2)  # the training goes on, and asks for more saves
                send(signal.SIGKILL, [rank.pid for rank in ranks])
    finally:
        send(signal.SIGCONT, savers)

    assert [first for first, _ in found] == [second for _, second in found]
    assert found[0] == [["none"], ["none"]], errors_of(tmp_path, 0).read_text()
    iterations = [first[0] for first, _ in found[1:]]
    assert iterations == sorted(iterations)
    assert iterations[0] >= 1
