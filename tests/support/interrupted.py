"""Compare runs that are interrupted and resumed with uninterrupted ones, for tests and `scripts/torture
resumes`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

from eventloop import Bus, Trainer
from eventloop.hooks import AmpOptimizerHook, CheckpointHook, EMAHook
from eventloop.resume.gathering import gather

SAMPLES, BATCH, EPOCHS = 62, 4, 5
PER_EPOCH = -(-SAMPLES // BATCH)
ITERS = PER_EPOCH * EPOCHS
AFTER = 50
"""Iterations that are compared after the last resume, at least."""


class Augmented(Dataset[Any]):
    """Samples with noise from all three generators, and a count of reads that is shared with workers."""

    def __init__(self, count: int = SAMPLES) -> None:
        self._inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
        self.reads = torch.zeros(count, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        inputs = self._inputs[index]
        noise = 0.3 * torch.randn(4) + random.gauss(0, 0.1) + float(np.random.randn()) * 0.1
        if random.random() < 0.5:
            inputs = inputs.flip(0)
        return inputs + noise, int(inputs.sum() > 0)


class EpochSampler(Sampler[int]):
    """A sampler that shuffles by the epoch set last, like a DistributedSampler of one rank."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.epoch, self._count = 0, count

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(100 + self.epoch)
        return iter(torch.randperm(self._count, generator=generator).tolist())


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        order: "global", shuffled by the global random state; "generator", by the loader's own; "sampler", by a
            generator that only the sampler knows, with replacement; "set_epoch", by the number of the epoch.
        workers, persistent, context: of the loader.
        cumulative_iters: batches to a step.
        by_epoch: whether the run is measured in epochs.
        limit: the most batches of a pass.
    """

    order: str = "global"
    workers: int = 0
    persistent: bool = False
    cumulative_iters: int = 1
    by_epoch: bool = True
    context: str | None = None
    limit: int | None = None

    def loader(self) -> DataLoader[Any]:
        """Return a new loader, as a new process would make it."""
        options: dict[str, Any] = {"num_workers": self.workers, "persistent_workers": self.persistent}
        if self.context is not None:
            options["multiprocessing_context"] = self.context
        if self.order == "sampler":
            drawn = torch.Generator().manual_seed(5)
            options["sampler"] = RandomSampler(range(SAMPLES), replacement=True, generator=drawn)
        elif self.order == "set_epoch":
            options["sampler"] = EpochSampler()
        else:
            options["shuffle"] = True
        if self.order == "generator":
            options["generator"] = torch.Generator().manual_seed(5)
        return DataLoader(Augmented(), BATCH, **options)


@dataclass
class Result:
    """The losses, the final state and the read counts of a run."""

    losses: dict[int, float]
    state: dict[str, Any]
    reads: torch.Tensor
    """How often each sample was read."""


def build(case: Case, directory: Path) -> tuple[Trainer, dict[int, float]]:
    """Return a trainer with every stateful part, and a dict that gets its losses by iteration."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    hooks = [
        EMAHook(momentum=0.01),
        AmpOptimizerHook(dtype="bfloat16", cumulative_iters=case.cumulative_iters),
        CheckpointHook(interval=-1),  # at the end of each part
    ]
    trainer = Trainer(
        model,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        train_loader=case.loader(),
        hooks=hooks,
        schedulers=[torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * ITERS)],
        max_epochs=EPOCHS if case.by_epoch else None,
        max_iters=None if case.by_epoch else ITERS,
        work_dir=directory,
        bus=Bus(drain_timeout=20.0),
        limit_batches=case.limit,
    )
    losses: dict[int, float] = {}
    trainer.bus.subscribe(
        lambda trainer, event: losses.update({event.iter: trainer.outputs["loss"].item()}), "after_train_iter"
    )
    return trainer, losses


def uninterrupted(case: Case, directory: Path) -> Result:
    """Return the result of a run in one piece."""
    seed()
    trainer, losses = build(case, directory)
    trainer.train()
    return _result(trainer, losses)


def interrupted(case: Case, directory: Path, stops: list[int]) -> Result:
    """Return the result of a run that is stopped after so many iterations, each part by a new trainer."""
    losses: dict[int, float] = {}
    reads = torch.zeros(SAMPLES, dtype=torch.int64)
    for part, stop in enumerate([*stops, ITERS + 1]):
        seed(7 if part == 0 else 1000 + part)
        trainer, of_part = build(case, directory)
        if part:
            trainer.resume()
        stop_after(trainer, stop)
        trainer.train()
        losses |= of_part
        result = _result(trainer, losses)
        reads += result.reads
    return Result(losses, result.state, reads)


def difference(whole: Result, parts: Result) -> str | None:
    """Return a text of the first difference of two results, or None if they are equal to the bit."""
    for number in sorted(whole.losses):
        if whole.losses[number] != parts.losses.get(number):
            return f"loss of iteration {number}: {whole.losses[number]!r}, {parts.losses.get(number)!r}"
    try:
        assert_same(whole.state, parts.state)
    except AssertionError as error:
        return f"state: {error}"
    return None


def random_stops(draw: random.Random) -> list[int]:
    """Return one to three iterations to stop after, in one epoch or anywhere, at least 50 before the end."""
    latest, count = ITERS - AFTER, draw.randint(1, 3)
    if draw.random() < 0.5:
        first = draw.choice(range(0, latest, PER_EPOCH))
        return sorted(draw.sample(range(first + 1, min(first + PER_EPOCH, latest) + 1), count))
    return sorted(draw.sample(range(1, latest + 1), count))


def seed(number: int = 7) -> None:
    """Seed every global generator."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def stop_after(trainer: Trainer, iterations: int) -> None:
    """Stop the run after so many iterations in all."""
    trainer.bus.subscribe(
        lambda trainer, event: trainer.stop("enough") if event.iter == iterations - 1 else None,
        "after_train_iter",
    )


def stopped(trainer: Trainer, after: int) -> Trainer:
    """Train for so many iterations, and return the trainer."""
    stop_after(trainer, after)
    trainer.train()
    return trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Return everything that changes the course of a training."""
    state = gather(trainer.state, "")
    best = state["hooks"]["checkpoint"]
    state["hooks"]["checkpoint"] = {key: value for key, value in best.items() if key != "kept"}
    del state["meta"]["time"]
    return state


def assert_same(a: Any, b: Any, where: str = "state") -> None:
    """Assert that nested states are equal to the bit."""
    assert type(a) is type(b), f"{where}: {a!r}, {b!r}"
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), f"{where}: {[*a]}, {[*b]}"
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), f"{where}: {a!r}, {b!r}"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    else:
        assert a == b, f"{where}: {a!r}, {b!r}"


def _result(trainer: Trainer, losses: dict[int, float]) -> Result:
    loader: Any = trainer.train_loader
    state = state_of(trainer)
    trainer.close()
    return Result(losses, state, loader.dataset.reads)
