"""Trainings whose handlers work now and then, with the time of each by a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from eventloop import Trainer
from eventloop.events import AfterTrainIter, SlowHandler
from eventloop.hooks import TraceHook
from tests.support.trainers import batches, build_trainer

ITERATIONS = 440
WINDOW = (200, 400)
"""The iterations that are traced: the first, and the one after the last."""
TOLERANCE = 0.02
"""How far a figure may be from the handler's own clock."""


class Worker:
    """A handler that is busy in 1 of `every` iterations, and notes when each of its calls begins and ends."""

    def __init__(self, every: int, phase: int, seconds: float, budget: float | None = None) -> None:
        self.name = f"works_{every}_{phase}"
        self.every, self.phase, self.seconds, self.budget = every, phase, seconds, budget
        self.calls: list[tuple[float, float]] = []

    def work(self, event: AfterTrainIter) -> None:
        """Compute until the time is over."""
        began = perf_counter()
        if event.iter % self.every == self.phase:
            while perf_counter() - began < self.seconds:
                pass
        self.calls.append((began, perf_counter()))


class Own(NamedTuple):
    """The least and the most that a handler took, in seconds: a machine may stop the process between two clocks.

    The least is from its first statement to its last, the most from the end of the handler before it to the beginning
    of the one after it.
    """

    least: float
    most: float

    def agrees(self, seconds: float, rounding: float = 0.0) -> bool:
        """Whether a figure is the truth, but for 2 % and its rounding."""
        low, high = (1 - TOLERANCE) * self.least, (1 + TOLERANCE) * self.most
        return low - rounding <= seconds <= high + rounding


@dataclass
class Worked:
    """A training that is over."""

    trainer: Trainer
    directory: Path
    own: dict[str, Own]
    traced: dict[str, Own]
    """Of the traced window."""
    slow: list[SlowHandler]

    @property
    def dearest(self) -> str:
        """The handler that took the most."""
        return max(self.own, key=lambda name: self.own[name].least)


def train(directory: Path, workers: list[Worker]) -> Worked:
    """Train with these handlers after all others, in this order."""
    chain = [Worker(1, 0, 0.0), *workers, Worker(1, 1, 0.0)]  # idle ones begin and end the chain
    trainer = build_trainer(
        directory, train_loader=batches(ITERATIONS), max_epochs=1, hooks=[TraceHook(windows=[WINDOW])]
    )
    slow: list[SlowHandler] = []
    trainer.bus.subscribe(slow.append, "slow_handler")
    for worker in chain:
        trainer.bus.subscribe(
            worker.work, "after_train_iter", priority="LOWEST", name=worker.name, budget_us=worker.budget
        )
    trainer.train()
    trainer.close()
    everywhere = range(ITERATIONS)
    return Worked(trainer, directory, _own(chain, everywhere), _own(chain, range(*WINDOW)), slow)


def _own(chain: list[Worker], iterations: range) -> dict[str, Own]:
    found = {}
    for before, worker, after in zip(chain, chain[1:], chain[2:], strict=False):
        least = sum(worker.calls[i][1] - worker.calls[i][0] for i in iterations)
        most = sum(after.calls[i][0] - before.calls[i][1] for i in iterations)
        found[worker.name] = Own(least, most)
    return found
