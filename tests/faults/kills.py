"""Which kills are tried: points in a run's operations, and moments nobody chose."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests import forked
from tests.faults.shim import Record, shimmed
from tests.faults.training import make_trainer
from tests.faults.trial import Point, Trial

ROOT = Path(__file__).parents[2]


def operations(directory: Path) -> Counter[str]:
    """How often a run that nothing disturbs calls each method of `Disk`."""
    record = Record()
    with shimmed(record):
        trainer = make_trainer(directory)
        trainer.train()
        trainer.close()
    return Counter(operation.name for operation in record.made)


def points(counts: Counter[str]) -> list[Point]:
    """All of them."""
    return [
        Point(name, when, hit)
        for name, count in sorted(counts.items())
        for hit in range(1, count + 1)
        for when in ("before", "after", *(["in"] if name in ("write", "remove") else []))
    ]


def at_points(directory: Path, chance: random.Random, number: int) -> list[Trial]:
    """Trials with so many kills at points; every other one is killed again where it was resumed."""
    chosen = points(operations(directory / "undisturbed"))
    chance.shuffle(chosen)
    trials: list[Trial] = []
    while (left := number - sum(len(trial.kills) for trial in trials)) > 0:
        first, again = chosen[len(trials) % len(chosen)], chance.choice(chosen)
        kills = [first, Point(again.name, again.when, chance.randint(1, 4))] if left > 1 else [first]
        trials.append(
            Trial(
                directory=str(directory / f"point{len(trials)}"),
                kills=kills[: 1 + len(trials) % 2],
                anew=chance.random() < 0.5,
                one_number=chance.random() < 0.5,
            )
        )
    return trials


def at_random(directory: Path, chance: random.Random, number: int) -> list[Trial]:
    """Trials that are each killed once from outside."""
    return [
        Trial(
            directory=str(directory / f"random{number}"),
            kills=[Point("random", "training", chance.randrange(9))],
            seed=chance.randrange(1 << 30),
            anew=chance.random() < 0.5,
        )
        for number in range(number)
    ]


def of_processes(directory: Path, chance: random.Random, number: int) -> list[Trial]:
    """Trials in which a process writes: it is killed at a point, alone or with the training; or one of them, or both,
    are from outside."""
    kinds = [
        Point("sync", "before", 4, process=True),
        Point("random", "both", 1),
        Point("random", "training", 1),
        Point("rename", "after", 3, process=True, parent=True),
        Point("random", "saver", 1),
    ]
    trials = []
    for turn in range(number):
        kind = kinds[turn % len(kinds)]
        if turn >= len(kinds):
            kind = msgspec.structs.replace(kind, hit=chance.randint(1, 6))
            if kind.process:
                name = chance.choice(["create", "write", "sync", "sync_directory", "rename"])
                kind = msgspec.structs.replace(kind, name=name, when=chance.choice(["before", "after"]))
        where = str(directory / f"process{turn}")
        trials.append(Trial(directory=where, kills=[kind], seed=chance.randrange(1 << 30), process=True))
    return trials


class Outcome(NamedTuple):
    """Of trials: the number of kills, and what was wrong."""

    killed: int
    errors: list[str]


def make(trials: Sequence[msgspec.Struct], program: str = "tests.faults.trial") -> Outcome:
    """Make the trials in a process of their own."""
    arguments = [msgspec.json.encode(trial).decode() for trial in trials]
    home = {**os.environ, "PYTHONPATH": str(ROOT)}
    made = forked.run(["-m", program, *arguments], cwd=ROOT, env=home, timeout=None)
    results = [json.loads(line) for line in made.stdout.splitlines()]
    errors = [result["error"] for result in results if result["error"]]
    if len(results) < len(trials):
        errors.append(f"{trials[len(results)]} had no end: {made.stderr[-2000:]}")
    return Outcome(sum(result["killed"] for result in results), errors)
