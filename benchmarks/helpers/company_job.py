"""The trainings of `company`: their sizes, the step that all engines share, and what one run notes of itself.

Every training is made of iterations. All engines save every `save_each` iterations; every `val_each` iterations they
validate one batch, and save again, because each score is the best so far. They log every 10 iterations. A step lasts
from the beginning of one forward pass to that of the next, with logs, validations and saves in it.

Nothing here imports eventloop, so that it is not in the processes of the others.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import lcm
from pathlib import Path
from time import monotonic, thread_time
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.helpers.training_step import Steps

EVERY = 10
"""Iterations from one log to the next."""
CLASSES = 10


class Training(msgspec.Struct, frozen=True):
    """The sizes of a training, by the benchmark it is taken from."""

    inputs: int
    width: int
    depth: int
    batch: int
    iterations: int
    """A multiple of the two intervals, as engines differ in whether they validate after the last iteration."""
    save_each: int
    val_each: int
    scalars: int = 1
    """Logged beside the loss."""
    slow_seconds: float = 0.0
    """What each log takes in addition, on a disk that takes its time."""
    burn_seconds: float = 0.004
    """Processor time for each batch in a worker of the loader, where loader workers are the company."""

    def shortened(self, parts: int) -> Training:
        """Return the training with about a part of its iterations, of which the last one still saves and validates."""
        both = lcm(self.save_each, self.val_each)
        return msgspec.structs.replace(self, iterations=max(1, self.iterations // parts // both) * both)


TRAININGS = {
    "peers": Training(64, 256, 2, 64, iterations=600, save_each=100, val_each=150, scalars=1),
    "checkpoint_stall": Training(
        1024, 1024, 6, 24, iterations=60, save_each=10, val_each=15, burn_seconds=0.06
    ),
    "small_checkpoints": Training(70, 70, 2, 256, iterations=560, save_each=28, val_each=40),
    "slow_writers": Training(
        128, 192, 2, 64, iterations=600, save_each=100, val_each=150, scalars=9, slow_seconds=0.02
    ),
}
"""The state of `checkpoint_stall` has 50 MB here, so that the table is complete in bearable time."""
SMALL_STATE, LARGE_STATE = "small_checkpoints", "checkpoint_stall"


class Batches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """As many batches as a training has iterations, each after so many seconds of the processor that makes it."""

    def __init__(self, training: Training, burn_seconds: float) -> None:
        self.inputs = torch.rand(training.batch, training.inputs)
        self.target = torch.randint(CLASSES, (training.batch,))
        self._length, self._burn_seconds = training.iterations, burn_seconds

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        until = thread_time() + self._burn_seconds
        while thread_time() < until:
            pass
        return self.inputs, self.target


class Job(Steps):
    """Model, optimizer and data of a training, the same in every engine, and the times at which steps begin."""

    def __init__(self, training: Training, *, workers: bool = False) -> None:
        torch.manual_seed(0)
        self.training = training
        sizes = [training.inputs, *[training.width] * training.depth]
        layers: list[nn.Module] = []
        for ins, outs in pairwise(sizes):
            layers += [nn.Linear(ins, outs), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(sizes[-1], CLASSES))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        data = Batches(training, training.burn_seconds if workers else 0.0)
        count = (os.cpu_count() or 1) if workers else 0
        self.loader = DataLoader(data, batch_size=None, num_workers=count)
        self.val_batch = (data.inputs, data.target)
        self.val_loader = DataLoader(
            Batches(msgspec.structs.replace(training, iterations=1), 0.0), batch_size=None
        )
        self.save_on_all_ranks: Callable[[Job, Notes, Path], None] | None = None
        """Saves by hand, where the ranks share the model; else rank 0 saves alone."""
        self.began: list[float] = []
        self._scores = 0

    def loss(self, batch: Any) -> torch.Tensor:
        """The forward pass, whose beginning is noted."""
        self.began.append(monotonic())
        return super().loss(batch)

    def validate(self) -> float:
        """A forward pass without gradients; return a score, better than all before."""
        with torch.no_grad():
            self.model(self.val_batch[0])
        self._scores += 1
        return float(self._scores)

    def values(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is logged of a step."""
        return {"loss": loss} | {f"scalar_{n}": loss * n for n in range(1, self.training.scalars + 1)}

    def state(self) -> dict[str, Any]:
        """What is saved by hand; without the names that a wrapper of several ranks adds."""
        model = getattr(self.model, "module", self.model)
        return {"model": model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Notes:
    """What is noted of one run: where the training thread was blocked by saves, and how late saves and logs were done."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._blocked: dict[int, float] = defaultdict(float)
        self._emitted: dict[int, float] = {}
        self.durable: list[float] = []
        self.lags: list[float] = []

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Add the time of the block to the save of this iteration, or of the last one that had a save."""
        began = monotonic()
        try:
            yield
        finally:
            self._blocked[len(self._job.began)] += monotonic() - began

    def emit(self, step: int) -> None:
        """Note that the values of a step are now to be logged."""
        self._emitted[step] = monotonic()

    def logged(self, step: int) -> None:
        """Note that they are in the file."""
        if step in self._emitted:
            self.lags.append(monotonic() - self._emitted[step])

    def blocked(self) -> tuple[list[float], list[float]]:
        """Return how long each save at the interval, and each best one, blocked the training thread.

        Where both are due in one iteration, as at the end, it counts with neither.
        """
        training, current = self._job.training, 0
        taken: dict[int, float] = defaultdict(float)
        for iteration in sorted(self._blocked):
            if iteration % training.save_each == 0 or iteration % training.val_each == 0:
                current = iteration
            taken[current] += self._blocked[iteration]
        taken.pop(0, None)
        at_save = {i: seconds for i, seconds in taken.items() if i % training.save_each == 0}
        at_best = {i: seconds for i, seconds in taken.items() if i % training.val_each == 0}
        both = at_save.keys() & at_best.keys()
        saves = [seconds for i, seconds in at_save.items() if i not in both]
        return saves, [seconds for i, seconds in at_best.items() if i not in both]


class Seen(msgspec.Struct):
    """What a run says of itself; times of the clock that all processes of the machine share."""

    first: float
    """Beginning of the first forward pass."""
    last: float
    """Beginning of the last one."""
    steps: list[float]
    saves: list[float]
    bests: list[float]
    durable: list[float]
    lags: list[float]
    loss: float

    @classmethod
    def of(cls, job: Job, notes: Notes) -> Seen:
        """Gather it at the end of a run.

        Raises:
            RuntimeError: the engine did not train each batch once.
        """
        began, wanted = job.began, job.training.iterations
        if len(began) != wanted:
            raise RuntimeError(f"the run had {len(began)} steps, and {wanted} were expected")
        saves, bests = notes.blocked()
        with torch.no_grad():
            loss = float(Steps.loss(job, job.val_batch))
        steps = [after - before for before, after in pairwise(began)]
        return cls(began[0], began[-1], steps, saves, bests, notes.durable, notes.lags, loss)


def save_by_hand(job: Job, notes: Notes, path: Path, rank: int) -> None:
    """Save as one does by hand, on rank 0: `torch.save`, fsync, rename, fsync of the folder."""
    if job.save_on_all_ranks is not None:
        job.save_on_all_ranks(job, notes, path)
        return
    if rank:
        return
    began = monotonic()
    with notes.saving():
        path = path.with_suffix(".pth")
        new = path.with_suffix(".new")
        with open(new, "wb") as file:
            torch.save(job.state(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    notes.durable.append(monotonic() - began)


def p99(values: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]
