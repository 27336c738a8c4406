"""Test resumes with loaders of accelerate, whose `state_dict` raises."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from eventloop import Trainer
from eventloop.hooks import CheckpointHook, EMAHook
from tests.support.accelerated import reset_accelerator
from tests.support.interrupted import assert_same
from tests.support.trainers import MakeTrainer

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """Reset accelerate's singletons after each test."""
    yield
    reset_accelerator()


class Samples(Dataset[Any]):
    """A data set of ten different samples."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index / 10, 1.0]), index % 3


Run = tuple[list[Any], dict[str, torch.Tensor]]


@pytest.fixture
def run(make_trainer: MakeTrainer, tmp_path: Path) -> Any:
    """Return a function that trains three epochs of five shuffled batches, or the part after a checkpoint,
    with another seed."""

    def train(name: str, *hooks: Any, seedable: bool, resume: Path | None = None) -> Run:
        torch.manual_seed(0)
        configuration = accelerate.DataLoaderConfiguration(use_seedable_sampler=seedable)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
        seen: list[Any] = []

        def step(trainer: Trainer, batch: Any) -> torch.Tensor:
            if torch.is_grad_enabled():
                seen.append((trainer.iter, batch[0][:, 0].tolist()))
            return F.cross_entropy(trainer.model(batch[0]), batch[1])

        trainer = make_trainer(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            train_step=step,
            max_epochs=3,
            max_iters=None,
            train_loader=accelerator.prepare(DataLoader(Samples(), 2, shuffle=True)),
            hooks=[CheckpointHook(1, by_epoch=False), *hooks],
            work_dir=tmp_path / name,
        )
        if resume is not None:
            torch.manual_seed(99)
            trainer.resume(resume)
        trainer.train()
        return seen, model.state_dict()

    return train


def assert_goes_on(whole: Run, rest: Run, done: int) -> None:
    """Assert that a resumed run has the remaining batches, and ends with the same weights."""
    assert rest[0] == whole[0][done:]
    assert all(torch.equal(value, rest[1][name]) for name, value in whole[1].items())


@pytest.mark.slow
@pytest.mark.parametrize("seedable", [False, True], ids=["torch's sampler", "accelerate's sampler"])
def test_resume_within_an_epoch(run: Any, tmp_path: Path, seedable: bool) -> None:
    """A resumed run leaves out the batches that were trained on, and shuffles later epochs as the first run
    did."""
    whole = run("whole", seedable=seedable)

    for done in (3, 8):
        assert_goes_on(
            whole, run(f"from {done}", seedable=seedable, resume=tmp_path / f"whole/iter_{done}"), done
        )


def test_the_log_says_how_the_place_is_kept(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The log has one line with the error of the loader's `state_dict`."""
    with caplog.at_level(logging.INFO, logger="eventloop"):
        run("run", seedable=False)

    lines = [record.getMessage() for record in caplog.records if "state_dict" in record.getMessage()]
    assert len(lines) == 1
    assert "DataLoaderShard" in lines[0]
    assert "AttributeError" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("by_hand", [False, True], ids=["train", "hand-written loop"])
def test_a_prepared_optimizer(make_trainer: MakeTrainer, tmp_path: Path, by_hand: bool) -> None:
    """With a prepared model, optimizer and loader, every step is averaged, and a resume is exact."""

    def train(name: str, resume: Path | None = None) -> list[Any]:
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True)
        plain = nn.Linear(2, 3)
        model, optimizer, loader = accelerator.prepare(
            plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), DataLoader(Samples(), 2)
        )
        ema = EMAHook(momentum=0.5)
        trainer = make_trainer(
            model=model,
            optimizer=optimizer,
            train_loader=loader,
            hooks=[CheckpointHook(1, by_epoch=False), ema],
            work_dir=tmp_path / name,
            default_hooks={"optimizer": None} if by_hand else {},
        )
        after: list[Any] = []
        trainer.bus.subscribe(
            lambda trainer, event: after.append(
                [plain.weight.detach().clone(), ema.ema_model.module.get_parameter("weight").detach().clone()]
            ),
            "after_train_iter",
            priority=99,
        )
        if resume is not None:
            trainer.resume(resume)
        if not by_hand:
            trainer.train()
        for _ in trainer.epochs() if by_hand else ():
            for batch in trainer.batches(loader):
                optimizer.zero_grad()
                trainer.train_step(batch)["loss"].backward()
                optimizer.step()
        return after

    whole = train("whole")
    rest = train("rest", tmp_path / "whole/iter_7")

    saved = [torch.load(tmp_path / f"whole/iter_{i}/state.pth", weights_only=True) for i in range(1, 11)]
    assert_same(
        [[each["ema_state_dict"]["module.weight"], each["state_dict"]["weight"]] for each in saved], whole
    )
    assert not any(torch.equal(*pair) for pair in itertools.pairwise(average for _, average in whole))
    assert_same(rest, whole[7:])
