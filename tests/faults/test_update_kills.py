"""A training by updates, with a remembered state and both weights validated, that is killed again and again."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import pytest

from tests.faults.updates import end_of
from tests.forked import ROOT, Forked
from tests.support.interrupted import assert_same

KILLS = 4
BUSY = 4
"""Processes that keep the CPUs busy meanwhile."""
MOST = 60.0
"""Seconds after which a training has surely begun, or ended."""


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Keep the machine busy within a block."""
    others = [Forked(["-c", "while True: pass"], cwd=Path(ROOT)) for _ in range(number)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def begin(directory: Path) -> Forked:
    """Begin or resume the training, and return once it trains."""
    process = Forked(
        ["-m", "tests.faults.updates", directory],
        cwd=Path(ROOT),
        env={**os.environ, "PYTHONPATH": ROOT},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "begun\n":
        raise AssertionError(process.communicate()[1])
    return process


def ended(process: Forked, seconds: float) -> bool:
    """Return whether a training ends by itself within so many seconds, and kill it if not."""
    try:
        _, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return False
    assert process.returncode == 0, error
    return True


def kill_and_resume(directory: Path, chance: random.Random, number: int) -> int:
    """Kill trainings at random moments until there were so many kills; compare the end of each with an undisturbed one."""
    whole = directory / "whole"
    began = perf_counter()
    assert ended(begin(whole), 10 * MOST)
    seconds, expected = perf_counter() - began, end_of(whole)
    kills = runs = 0
    while kills < number:
        run, runs = directory / f"run{runs}", runs + 1
        most = chance.randint(1, 4)
        while not ended(begin(run), chance.uniform(0, seconds) if most else 10 * MOST):
            kills, most = kills + 1, most - 1
        assert_same(end_of(run), expected, f"seed {run}")
    return kills


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_training_by_updates(directory: Path) -> None:
    """On a busy machine each resumed run ends with the checkpoint of an undisturbed one, to the bit: weights, averages,
    optimizer, what the program remembers, random states; and the best one is the same."""
    with busy(BUSY):
        assert kill_and_resume(directory, random.Random(5), KILLS) >= KILLS
