"""Trainings that are interrupted at random points and resumed, beside those that were not interrupted.

Each trial stops a run one to three times, within one epoch or anywhere, and resumes it each time from the checkpoint
with a new trainer. Weights, buffers, optimizer, averages, random states, the loader's place and the losses of all
iterations, at least 50 after the last resume, have to be equal to the bit, and with no worker processes no sample may
be read twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.support.interrupted import Case, difference, interrupted, random_stops, uninterrupted

CASES = [
    *(
        Case(order, workers)
        for workers in (0, 2)
        for order in ("global", "generator", "sampler", "set_epoch")
    ),
    *(Case("global", workers, cumulative_iters=3) for workers in (0, 2)),
    *(Case("set_epoch", workers, by_epoch=False) for workers in (0, 2)),
    Case("global", 2, persistent=True),
    Case("generator", 3, persistent=True),
    Case("sampler", 2, persistent=True, cumulative_iters=3, by_epoch=False),
]


def trials(directory: Path, chance: random.Random, number: int) -> Iterator[tuple[str, str]]:
    """So many, one case after the other: what was tried, and what differs; "" if nothing does."""

    @cache
    def whole(case: Case) -> Any:
        return uninterrupted(case, directory / f"whole{CASES.index(case)}")

    for trial in range(number):
        case, stops = CASES[trial % len(CASES)], random_stops(chance)
        parts = interrupted(case, directory / f"parts{trial}", stops)
        wrong = difference(whole(case), parts) or ""
        if not wrong and not case.workers and not torch.equal(whole(case).reads, parts.reads):
            wrong = "samples were read twice"
        yield f"{case}, stopped after {stops}", wrong
