"""State that a prediction leaves as it was: modes, random generators, samplers, and the training itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from eventloop import Trainer
from eventloop.data.loader_state import random_state
from tests.support.interrupted import assert_same
from tests.support.predicting import loader_of
from tests.support.trainers import (
    MakeTrainer,
    collect,
    samples,
    shuffled,
)


def test_modes_and_random_states_are_restored(make_trainer: MakeTrainer) -> None:
    """Each module has its mode again, frozen ones too, and all generators go on as before."""
    trainer = make_trainer()
    trainer.model.train()
    trainer.model[1].eval()  # type: ignore[index]
    loader = loader_of(shuffle=True, generator=torch.Generator().manual_seed(3))
    modes, state = [module.training for module in trainer.model.modules()], random_state(loader)

    trainer.predict(loader)

    assert [module.training for module in trainer.model.modules()] == modes
    assert_same(random_state(loader), state)


def test_modes_are_restored_after_an_error(make_trainer: MakeTrainer) -> None:
    """A step that fails ends the prediction with its closing event."""

    def fail(trainer: Trainer, batch: Any) -> Any:
        raise KeyError("no such column")

    trainer = make_trainer(predict_step=fail)
    seen = collect(trainer, "after_predict")

    with pytest.raises(KeyError, match="no such column"):
        trainer.predict(loader_of())

    assert trainer.model.training
    assert [event.reason for event in seen] == ["error"]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_training_does_not_notice_a_prediction(
    tmp_path: Path, make_trainer: MakeTrainer, workers: int
) -> None:
    """A handler may predict on the train loader itself in mid-epoch; the run ends with the same bits."""
    ended = []
    for predicts in (False, True):
        torch.manual_seed(5)
        loader = shuffled(4, num_workers=workers, persistent_workers=workers > 0)
        trainer = make_trainer(work_dir=tmp_path / str(predicts), train_loader=loader)

        def predict_again(trainer: Trainer, event: Any, loader: Any = loader) -> None:
            assert trainer.predict(loader).shape == (16, 3)

        if predicts:
            trainer.bus.subscribe(predict_again, "after_train_iter", every=3)
        trainer.train()
        ended.append((trainer.model.state_dict(), random_state(loader)))
        trainer.train_loader = trainer.loader = None

    assert_same(ended[0], ended[1])


class Counting(Sampler[int]):
    """Draw another order in each pass, and save which one is next."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(8, generator=torch.Generator().manual_seed(self.passes))
        self.passes += 1
        return iter(order.tolist())

    def __len__(self) -> int:
        return 8

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


def test_state_of_a_sampler_is_restored(make_trainer: MakeTrainer) -> None:
    """Its next pass is that which it would have had."""
    loader = DataLoader(samples(8), batch_size=4, sampler=Counting())

    make_trainer().predict(loader)

    assert loader.sampler.passes == 0  # type: ignore[attr-defined]


def test_train_loader_with_a_position_is_refused_within_an_epoch(make_trainer: MakeTrainer) -> None:
    """A second pass would move it; between epochs nothing is moved."""
    loader = DataLoader(samples(8), batch_size=4, sampler=Counting())
    trainer = make_trainer(train_loader=loader)
    rows: list[int] = []
    trainer.bus.subscribe(lambda trainer, event: rows.append(len(trainer.predict(loader))), "before_train")
    trainer.bus.subscribe(lambda trainer, event: trainer.predict(loader), "after_train_iter")

    with pytest.raises(
        TypeError, match=r"predict: loader must be another than the train loader .* got one with a Counting"
    ):
        trainer.train()

    assert rows == [8]
