"""Test that a pass which is resumed with batches of another size has each of its samples once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from tests.support.interrupted import stop_after
from tests.support.trainers import MakeTrainer

COUNT = 22
ALL = [*range(COUNT)]


class Numbers(Dataset[int]):
    """Each sample is its number."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index


def with_generator(batch: int) -> DataLoader[Any]:
    """Return a loader that is shuffled by its own generator."""
    return DataLoader(Numbers(), batch, shuffle=True, generator=torch.Generator().manual_seed(5))


def with_batch_sampler(batch: int) -> DataLoader[Any]:
    """Return a loader whose batch sampler is given."""
    return DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(ALL), batch, False))


LOADERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "shuffled": lambda batch: DataLoader(Numbers(), batch, shuffle=True),
    "generator": with_generator,
    "batch sampler": with_batch_sampler,
}
WITH_WORKERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "workers": lambda batch: DataLoader(Numbers(), batch, shuffle=True, num_workers=2),
    "persistent": lambda batch: DataLoader(
        Numbers(), batch, shuffle=True, num_workers=2, persistent_workers=True
    ),
}


def train(
    make_trainer: MakeTrainer, loader: Any, directory: Path, stop: int | None = None, **changes: Any
) -> tuple[list[list[int]], Trainer]:
    """Train a part of a run of two epochs, resumed if there is a checkpoint; return the samples of each step."""
    steps: list[list[int]] = []

    def step(trainer: Trainer, batch: torch.Tensor) -> dict[str, Any]:
        steps.append(batch.tolist())
        return {"loss": trainer.model(torch.zeros(2, 2)).sum()}

    trainer = make_trainer(
        train_loader=loader, train_step=step, hooks=[CheckpointHook()], work_dir=directory, **changes
    )
    if any(directory.glob("*_[0-9]*")):
        trainer.resume("auto", changed={"batch_size": "apply"})
    if stop is not None:
        stop_after(trainer, stop)
    trainer.train()
    return steps, trainer


def flat(steps: list[list[int]]) -> list[int]:
    """Return the samples of all steps."""
    return [sample for step in steps for sample in step]


@pytest.mark.parametrize("kind", [*LOADERS, *(pytest.param(k, marks=pytest.mark.slow) for k in WITH_WORKERS)])
@pytest.mark.parametrize(
    ("before", "stop", "after"),
    [(4, 3, 3), (4, 1, 9), (1, 1, 4), (4, 5, 7), (3, 4, 25), (5, 5, 2), (4, 3, 2)],
)
def test_each_sample_once(
    make_trainer: MakeTrainer, tmp_path: Path, kind: str, before: int, stop: int, after: int
) -> None:
    """Both epochs have each sample once, in the order of the run that was interrupted, also if the resumed run is
    stopped again in the same epoch."""
    loader = {**LOADERS, **WITH_WORKERS}[kind]
    torch.manual_seed(3)
    order, _ = train(make_trainer, loader(before), tmp_path / "whole")
    torch.manual_seed(3)
    first, _ = train(make_trainer, loader(before), tmp_path / "run", stop)

    second, trainer = train(make_trainer, loader(after), tmp_path / "run", stop + 1)
    third, _ = train(make_trainer, loader(after), tmp_path / "run")

    seen = flat(first + second + third)
    assert seen[:COUNT] == flat(order)[:COUNT]
    assert sorted(seen[COUNT:]) == ALL
    assert trainer.iter == stop + 1


def test_a_trainer_that_goes_on(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A trainer that has begun within a batch, and is stopped in the last batch but one, trains on the rest."""
    loader = DataLoader(Numbers(), 1, shuffle=True)
    first, _ = train(make_trainer, loader, tmp_path / "run", 1)
    second, trainer = train(make_trainer, DataLoader(Numbers(), 4, shuffle=True), tmp_path / "run", 6)

    trainer.train()

    seen = flat(first + second)
    assert (sorted(seen[:COUNT]), sorted(seen[COUNT:])) == (ALL, ALL)
    assert trainer.iter == 1 + 6 + 6


def test_the_log_says_where(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the number of samples after which the pass continues."""
    train(make_trainer, DataLoader(Numbers(), 4), tmp_path / "run", 3)

    with caplog.at_level(logging.WARNING, "eventloop"):
        train(make_trainer, DataLoader(Numbers(), 5), tmp_path / "run")

    assert "the pass continues after 12 of its samples, with 5 samples in a step" in caplog.text


@pytest.mark.parametrize(("limit", "left", "length"), [(3, [ALL[12:19]], 3), (0.5, [], 2)])
def test_a_limit(
    make_trainer: MakeTrainer, tmp_path: Path, limit: float, left: list[list[int]], length: int
) -> None:
    """A limit counts batches of the new size: after 12 samples the next batch is the third of four."""
    train(make_trainer, DataLoader(Numbers(), 4), tmp_path / "run", 3)

    rest, _ = train(make_trainer, DataLoader(Numbers(), 7), tmp_path / "run", limit_batches=limit)

    assert rest == left + [ALL[7 * i : 7 * i + 7] for i in range(length)]


class Odd(BatchSampler):
    """A batch sampler of somebody's own, with one sample less in the first batch."""

    def __iter__(self) -> Any:
        numbers = ALL
        yield numbers[: self.batch_size - 1]
        yield from (
            numbers[i : i + self.batch_size] for i in range(self.batch_size - 1, COUNT, self.batch_size)
        )


def test_batches_that_cannot_be_counted(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch sampler of somebody's own is resumed after the same fraction of its batches, and the log says so."""
    train(make_trainer, DataLoader(Numbers(), batch_sampler=Odd(ALL, 4, False)), tmp_path / "run", 3)

    with caplog.at_level(logging.WARNING, "eventloop"):
        rest, _ = train(
            make_trainer, DataLoader(Numbers(), batch_sampler=Odd(ALL, 2, False)), tmp_path / "run"
        )

    assert flat(rest)[:1] == ALL[9:10]  # after 5 of 11 batches
    assert "after the same fraction of its batches: samples may come twice, or not at all" in caplog.text
