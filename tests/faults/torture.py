"""The long form of the fault tests.

scripts/torture [--seed N] [kills] [shards] [operations] [crashes] [damage] [resumes] [signals] [mutants]
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.faults import kills, precise, resumes, sharded_trial
from tests.faults.crash_states import SCENARIOS, check_crash, crashes
from tests.faults.damage import BY_CHANCE, FILES, HOSTILE, ON_PURPOSE, Damaged, flip, replace_payload
from tests.faults.mutation import all_faults, survivors
from tests.faults.operations import CASES, all_tries, check_training, check_try, training_tries
from tests.faults.sharded_training import RANKS
from tests.support.in_memory import directory_in_memory
from tests.support.preempted import PLACES, Trials
from tests.support.signals import receiving_signals
from tests.support.trainers import build_trainer

POINTS, MOMENTS, PROCESSES, FLIPS, DAMAGES, RESUMES, SIGNALS, SHARDS = 340, 110, 30, 520, 240, 50, 40, 60
BATCH = 20
"""Trials of a kill that one process makes."""

LEAST = {
    "kills": {"kill at a point": 300, "kill at any moment": 100},
    "shards": dict.fromkeys(RANKS, 40),
    "damage": {"flip": 500},
    "resumes": {"resume": 50},
    "signals": {"SIGTERM": 60, "PreciseBN": 12},
}
"""How many there must be of what: fewer are wrong too, for a trial may end before its kill comes."""


class Tried(NamedTuple):
    """One thing that was tried, and what was wrong, "" if nothing was; and what it is counted as."""

    what: str
    error: str = ""
    kinds: tuple[str, ...] = ()


def print_now(text: str) -> None:
    """Print it now."""
    sys.stdout.write(text)
    sys.stdout.flush()


def attempt(what: str, try_it: Callable[..., object], *arguments: Any, kinds: tuple[str, ...] = ()) -> Tried:
    """Try something."""
    try:
        try_it(*arguments)
    except Exception as error:
        return Tried(what, f"{type(error).__name__}: {error}", kinds)
    return Tried(what, kinds=kinds)


def try_kills(directory: Path, chance: random.Random) -> Iterator[Tried]:
    """Every kill is one; a trial that ended before its point is none."""
    for name, trials in (
        ("kill at a point", kills.at_points(directory, chance, POINTS)),
        ("kill at any moment", kills.at_random(directory, chance, MOMENTS)),
        ("kill of the process that writes", kills.of_processes(directory, chance, PROCESSES)),
    ):
        yield from _in_batches(name, trials, kills.make)


def try_shards(directory: Path, chance: random.Random) -> Iterator[Tried]:
    """Every kill of a rank or of its saver is one; a trial that ended before its point is none."""
    make = partial(kills.make, program="tests.faults.sharded_trial")
    for kind in RANKS:
        yield from _in_batches(kind, sharded_trial.choose(directory, kind, chance, SHARDS), make)


def _in_batches(name: str, trials: Sequence[Any], make: Callable[..., kills.Outcome]) -> Iterator[Tried]:
    for start in range(0, len(trials), BATCH):
        killed, errors = make(trials[start : start + BATCH])
        yield from (Tried(name, kinds=(name,)) for _ in range(killed - len(errors)))
        yield from (Tried(name, error, (name,)) for error in errors)


def try_operations(directory: Path, chance: random.Random) -> Iterator[Tried]:
    """Every operation with every fault."""
    for case in CASES:
        for number, each in enumerate(all_tries(directory / case, case)):
            yield attempt(str(each), check_try, directory / f"{case}{number}", each)
    for number, name, fault in training_tries(directory / "undisturbed"):
        what = f"operation {number} of a training, {name}, {fault}"
        yield attempt(what, check_training, directory / f"{number}-{fault}", number, fault)


def try_crashes(directory: Path, chance: random.Random) -> Iterator[Tried]:
    """Every state that a power cut may leave."""
    for name, scenario in SCENARIOS.items():
        for number, crash in enumerate(crashes(directory / name, scenario)):
            yield attempt(f"{name}, state {number}", check_crash, directory / f"{name}{number}", crash)


def try_damage(directory: Path, chance: random.Random) -> Iterator[Tried]:
    """Damage by chance, and on purpose."""
    damaged = Damaged(directory)

    def check(what: str, automatic: bool = True, message: str | None = None, kind: str = "") -> Tried:
        tried = attempt(
            what, partial(damaged.check, automatic=automatic, message=message), kinds=(kind,) * bool(kind)
        )
        damaged.restore()
        return tried

    for turn in range(FLIPS + DAMAGES):
        change = flip if turn < FLIPS else chance.choice(BY_CHANCE)
        what = change(damaged.newer / chance.choice(FILES), chance)
        yield check(what, turn % 5 == 0, kind=change.__name__)
    for name, (spoil, message) in ON_PURPOSE.items():
        spoil(damaged)
        yield check(name, message=message)
    for hostile in HOSTILE:
        replace_payload(damaged.newer, hostile(directory / "executed"))
        yield check(hostile.__name__)
    yield Tried("nothing was executed", "something was" if (directory / "executed").exists() else "")
    damaged.trainer.close()


def try_resumes(directory: Path, chance: random.Random) -> Iterator[Tried]:
    """Every training that is interrupted and resumed is one."""
    warnings.simplefilter("ignore")  # of loaders with more workers than this machine has cores
    yield from (Tried(*trial, ("resume",)) for trial in resumes.trials(directory, chance, RESUMES))


def try_signals(directory: Path, chance: random.Random) -> Iterator[Tried]:
    """Every signal is one; so many in each place."""
    with receiving_signals() as heard:
        for place in PLACES:
            made = Trials(build_trainer, directory / place, place, chance)
            for number in range(SIGNALS):
                tried = attempt(f"signal in {place}", made.make, number)
                yield tried._replace(kinds=(signal.Signals(heard[-1]).name, place))
        for what, try_it in precise.trials(directory / "PreciseBN"):
            yield attempt(what, try_it, kinds=("SIGTERM", "PreciseBN"))


def try_mutants(directory: Path, chance: random.Random) -> Iterator[Tried]:
    """Every fault in the code."""
    for fault in all_faults():
        left = survivors([fault], print_now)
        yield Tried(f"{fault.file}: {fault.what}", "no test sees it" if left else "")


PARTS: dict[str, Callable[[Path, random.Random], Iterator[Tried]]] = {
    "kills": try_kills,
    "shards": try_shards,
    "operations": try_operations,
    "crashes": try_crashes,
    "damage": try_damage,
    "resumes": try_resumes,
    "signals": try_signals,
    "mutants": try_mutants,
}


def too_few(part: str, made: Counter[str]) -> int:
    """Say how many of what a part has made; the number of kinds of which there must be more."""
    least = LEAST.get(part, {})
    for kind in {**made, **least}:
        must = f", must be {least[kind]}" if made[kind] < least.get(kind, 0) else ""
        print_now(f"  {kind}: {made[kind]}{must}\n")
    return sum(made[kind] < number for kind, number in least.items())


def main() -> int:
    """Try the parts that are named, or all; the number of things that went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--seed", type=int, default=int(time.time()))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("eventloop").addHandler(logging.NullHandler())
    logging.getLogger("eventloop").propagate = False
    wrong = 0
    for name in chosen.parts or PARTS:
        began, tried = time.monotonic(), []
        with directory_in_memory() as directory:
            for each in PARTS[name](directory, random.Random(chosen.seed)):
                tried.append(each)
                if each.error:
                    print_now(f"{name}: {each.what}: {each.error}\n")
        good = sum(not each.error for each in tried)
        wrong += len(tried) - good + too_few(name, Counter(kind for each in tried for kind in each.kinds))
        print_now(f"{name}: {good} of {len(tried)}, seed {chosen.seed}, {time.monotonic() - began:.0f} s\n")
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
