"""Evaluations draw random numbers too: a resumed run trains as the uninterrupted one does, wherever in one it was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from tests.support.interrupted import assert_same, seed, state_of
from tests.support.trainers import MakeTrainer, samples, shuffled, tiny_model


def build(make_trainer: MakeTrainer, directory: Path, **loaders: Any) -> Trainer:
    """A trainer that saves where it ends, whose every loader draws from a generator."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    arguments = {
        "train_loader": shuffled(5),
        "val_loader": DataLoader(samples(12), 4),
        "max_epochs": 4,
        "hooks": [CheckpointHook()],
        **loaders,
    }
    return make_trainer(model=model, optimizer=optimizer, work_dir=directory, **arguments)


def stop_at(trainer: Trainer, event: str, count: int) -> None:
    """Stop the run when an event comes for the `count`-th time."""
    seen: list[Any] = []

    def stop(trainer: Trainer, event: Any) -> None:
        seen.append(event)
        if len(seen) == count:
            trainer.stop("enough")

    trainer.bus.subscribe(stop, event)


def with_noise(trainer: Trainer, batch: Any) -> dict[str, Any]:
    """A validation step that draws random numbers itself."""
    return {"noise": torch.rand(())}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "count", "unit"),
    [
        ("before_val", 2, {}),
        ("before_val_iter", 4, {"max_epochs": None, "max_iters": 13, "val_interval": 4}),
        ("after_val_iter", 6, {}),
    ],
)
def test_one_that_is_cut_short(
    make_trainer: MakeTrainer, tmp_path: Path, unit: dict[str, Any], event: str, count: int
) -> None:
    """It is run again by the resumed run, and draws what the uninterrupted one does once."""
    seed()
    whole = build(make_trainer, tmp_path / "whole", val_step=with_noise, **unit)
    whole.train()
    seed()
    first = build(make_trainer, tmp_path / "parts", val_step=with_noise, **unit)
    stop_at(first, event, count)
    first.train()
    seed(99)
    second = build(make_trainer, tmp_path / "parts", val_step=with_noise, **unit)

    second.resume()
    second.train()

    assert first.iter < second.iter == whole.iter
    assert_same(state_of(second), state_of(whole))


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True], ids=["global", "shared"])
def test_workers_that_persist(make_trainer: MakeTrainer, tmp_path: Path, own: bool) -> None:
    """They are seeded once in a process, in a resumed one by another evaluation: the training draws the same, from the
    global generator as from one that both loaders have."""

    def loaders() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(5) if own else None
        evaluated = DataLoader(samples(12), 4, num_workers=1, persistent_workers=True, generator=generator)
        return {"train_loader": shuffled(5, generator=generator), "val_loader": evaluated}

    seed()
    whole = build(make_trainer, tmp_path / "whole", **loaders())
    whole.train()
    seed()
    first = build(make_trainer, tmp_path / "parts", **loaders())
    stop_at(first, "after_train_iter", 7)
    first.train()
    seed(99)
    second = build(make_trainer, tmp_path / "parts", **loaders())

    second.resume()
    second.train()

    assert (first.iter, second.iter) == (7, 20)
    assert_same(state_of(second), state_of(whole))
    for trainer in (whole, first, second):
        trainer.val_loader = (
            None  # collected with the trainer, each of its workers is waited for, for five seconds
        )


def test_a_generator_that_both_loaders_have(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """The checkpoint of an epoch is saved before the validation that follows it, which the resumed run makes up for: what
    that draws is drawn before the next pass begins, as it was."""

    def trainer(name: str) -> Trainer:
        generator = torch.Generator().manual_seed(5)
        loaders = {
            "train_loader": shuffled(5, generator=generator),
            "val_loader": DataLoader(samples(12), 4, generator=generator),
        }
        return build(make_trainer, tmp_path / name, hooks=[CheckpointHook(interval=1)], **loaders)

    seed()
    whole = trainer("whole")
    whole.train()
    seed(99)
    second = trainer("second")

    second.resume(tmp_path / "whole" / "epoch_2")
    second.train()

    assert second.iter == whole.iter == 20
    assert_same(state_of(second), state_of(whole))
