"""Test what a resume does with weights under other names, and with parameters outside of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError
from tests.support.interrupted import assert_same, stop_after
from tests.support.trainers import MakeTrainer


class Net(nn.Module):
    """Two layers of one shape, and a head, under given names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.names = names
        for name in names:
            self.add_module(name, nn.Linear(2, 2))
        self.head = nn.Linear(2, 3)

    def forward(self, inputs: torch.Tensor) -> Any:
        for name in self.names:
            inputs = self.get_submodule(name)(inputs)
        return self.head(inputs)


def trainer_of(make_trainer: MakeTrainer, work_dir: Path, *names: str) -> Trainer:
    """Return a trainer with a state for each parameter, whose order has nothing to do with the names."""
    model = Net(*names)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return make_trainer(model=model, optimizer=optimizer, work_dir=work_dir, max_epochs=4)


def saved(make_trainer: MakeTrainer, work_dir: Path) -> None:
    """Train two of four epochs."""
    trainer = trainer_of(make_trainer, work_dir, "first", "second")
    stop_after(trainer, 6)
    trainer.train()


def test_renamed_weights_are_named(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """The error says which names fit by their shape, and what to write."""
    saved(make_trainer, tmp_path)

    with pytest.raises(
        CheckpointError,
        match=r"'second' -> 'last' \(2 of them\)(.|\n)*weights\['last.weight'\] = weights.pop\('second.weight'\)",
    ):
        trainer_of(make_trainer, tmp_path, "first", "last").resume()


def test_names_that_could_be_either_are_not_guessed(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Where two layers of one shape have other names, no pair is named."""
    saved(make_trainer, tmp_path)

    with pytest.raises(CheckpointError, match=r"first\.weight") as error:
        trainer_of(make_trainer, tmp_path, "one", "two").resume()

    assert "->" not in str(error.value)


def test_renamed_weights_go_on_with_their_moments(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """What a handler of after_load_checkpoint renames is renamed for the optimizer's state, too."""
    whole = trainer_of(make_trainer, tmp_path / "whole", "first", "second")
    whole.train()
    saved(make_trainer, tmp_path / "run")
    trainer = trainer_of(make_trainer, tmp_path / "run", "one", "two")

    @trainer.bus.on("after_load_checkpoint")
    def rename(trainer: Trainer, event: Any) -> None:
        assert trainer.checkpoint is not None
        weights = trainer.checkpoint["state_dict"]
        for old, new in {"first": "one", "second": "two"}.items():
            for end in ("weight", "bias"):
                weights[f"{new}.{end}"] = weights.pop(f"{old}.{end}")

    trainer.resume()
    trainer.train()

    assert_same([*trainer.model.state_dict().values()], [*whole.model.state_dict().values()])


class Weighted(nn.Module):
    """A loss with two learned scales of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) * self.a + self.b**2


@pytest.mark.parametrize("names", ["of the loss", "of the optimizer", "none"])
def test_parameters_outside_of_the_model_in_another_order(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, names: str
) -> None:
    """They are found by their name in the loss or in the optimizer; without one the log says so."""

    def make(turn: int) -> tuple[Trainer, Weighted]:
        model, loss = nn.Linear(2, 3), Weighted()
        outside: list[Any] = [("a", loss.a), ("b", loss.b)][::turn]
        given = [*model.named_parameters(), *outside]
        optimizer = torch.optim.Adam(given if names == "of the optimizer" else [p for _, p in given])
        loss_fn: Any = loss if names == "of the loss" else loss.forward
        return make_trainer(model=model, optimizer=optimizer, loss_fn=loss_fn, work_dir=tmp_path), loss

    first, loss = make(1)
    first.train()
    trainer, other = make(-1)
    trainer.resume()

    moments = [
        [each.optimizer.state[p]["exp_avg"] for p in (own.a, own.b)]
        for each, own in ((first, loss), (trainer, other))
    ]
    assert torch.equal(moments[0][0], moments[1][0]) == (names != "none")
    assert torch.equal(moments[0][1], moments[1][1]) == (names != "none")
    assert ("2 parameters of the optimizer that are not the model's have no names" in caplog.text) == (
        names == "none"
    )
