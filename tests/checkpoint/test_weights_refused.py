"""Test weights that do not fit a model, and weights that only seem not to fit."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eventloop.checkpoint import CheckpointError
from tests.support.other_weights import has, put, weights
from tests.support.trainers import MakeTrainer, tiny_model


def topped(head: nn.Module) -> nn.Sequential:
    """Return the tiny model with another last layer."""
    return nn.Sequential(*[*tiny_model().children()][:3], head)


def test_refusals_say_what_to_do(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """The refusal's advice works: remove entries in a handler, and load with `strict=False`."""
    path = put(tmp_path / "w.pth", weights())
    model = topped(nn.Linear(8, 5))
    trainer = make_trainer(model=model)
    advice = (
        r"\nGive the Trainer the model .* trainer\.checkpoint\['state_dict'\] in a handler of "
        r"after_load_checkpoint; if only names differ, load_checkpoint\(path, strict=False\) loads"
    )
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=rf"\(3,\), the model \(5,\){advice}"):
            trainer.load_checkpoint(path, strict=strict)

    @trainer.bus.on("after_load_checkpoint")
    def without_head(trainer: Any, event: Any) -> None:
        for name in ("3.weight", "3.bias"):
            del trainer.checkpoint["state_dict"][name]

    with pytest.raises(
        CheckpointError, match=rf"3\.bias: \(5,\) in the model, not in the checkpoint{advice}"
    ):
        trainer.load_checkpoint(path)
    trainer.load_checkpoint(path, strict=False)
    assert torch.equal(model.state_dict()["0.weight"], weights()["0.weight"])


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: {"model": model, "epoch": 3}])
def test_a_whole_model_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path, wrap: Callable[[nn.Module], Any]
) -> None:
    """The error says what to save instead, without PyTorch's control codes and its advice to execute the file."""
    torch.save(wrap(tiny_model()), tmp_path / "whole.pth")

    with pytest.raises(
        CheckpointError, match=r"objects of torch\.nn\.\S+,.* save model\.state_dict\(\) instead$"
    ) as caught:
        make_trainer().load_checkpoint(tmp_path / "whole.pth")

    assert "\x1b" not in str(caught.value)
    assert "weights_only" not in str(caught.value)


def test_names_that_differ_are_logged(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `strict=False` differing names are logged; no common name at all is always an error."""
    state = {**weights(), "4.bias": torch.ones(2)}
    del state["0.bias"]

    with caplog.at_level(logging.WARNING, "eventloop"):
        make_trainer().load_checkpoint(put(tmp_path / "w.pth", state), strict=False)

    (told,) = caplog.messages
    assert told == (
        f"{tmp_path / 'w.pth'} and the model differ in names; the common names were loaded:\n"
        "  0.bias: (8,) in the model, not in the checkpoint\n  4.bias: (2,) in the checkpoint, not in the model"
    )
    other = put(tmp_path / "other.pth", {f"backbone.{name}": value for name, value in weights().items()})
    with pytest.raises(
        CheckpointError, match=r"backbone\.0\.weight: \(8, 2\) in the checkpoint, not in the model"
    ):
        make_trainer().load_checkpoint(other, strict=False)


class Picky(nn.Linear):
    """A layer with an extra state, which it refuses only while it loads."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.seen: list[int] = [1]

    def get_extra_state(self) -> list[int]:
        return self.seen

    def set_extra_state(self, state: list[int]) -> None:
        self.seen = state
        if not isinstance(state, list):
            raise TypeError("expected a list")


@pytest.mark.parametrize("state", [None, {"a": 1}, torch.ones(3)])
def test_a_module_that_refuses_its_state(make_trainer: MakeTrainer, tmp_path: Path, state: object) -> None:
    """If a module refuses its state, the weights loaded before it are restored, and its error is in the
    message."""
    model = topped(Picky())
    path = put(tmp_path / "w.pth", {"state_dict": {**weights(), "3._extra_state": state}})
    trainer = make_trainer(model=model)
    before = copy.deepcopy(model.state_dict())

    message = re.escape(
        f"{path} does not fit the model; nothing was loaded: TypeError: expected a list\nGive the Trainer "
    )
    with pytest.raises(CheckpointError, match=message):
        trainer.load_checkpoint(path)

    after = model.state_dict()
    assert after.pop("3._extra_state") == before.pop("3._extra_state") == [1]
    assert all(torch.equal(after[name], value) for name, value in before.items())


class Growing(nn.Module):
    """A module whose extra state grows with each batch, and is None at first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()
        self.seen: torch.Tensor | None = None

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        one = inputs.new_ones(1)
        self.seen = one if self.seen is None else torch.cat([self.seen, one])
        scaled: torch.Tensor = self.inner(inputs) * self.seen.mean()
        return scaled


class Resizing(nn.Module):
    """A module that loads with a method of its own: a buffer takes the saved size, as quantization's
    observers do."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()
        self.register_buffer("seen", torch.empty(0))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.seen = torch.empty_like(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, inputs.new_ones(1)])
        scaled: torch.Tensor = self.inner(inputs) * self.seen.mean()
        return scaled


@pytest.mark.parametrize(("build", "name"), [(tiny_model, "3.weight"), (Resizing, "inner.3.weight")])
def test_tensors_of_another_layout(
    make_trainer: MakeTrainer, tmp_path: Path, build: Callable[[], nn.Module], name: str
) -> None:
    """If torch refuses a sparse tensor while it copies, all former values and sizes are restored."""
    state = {**build().state_dict(), "seen": torch.ones(4), name: torch.ones(3, 8).to_sparse()}
    trainer = make_trainer(model=build())
    before = copy.deepcopy(trainer.model.state_dict())
    path = put(tmp_path / "w.pth", {key: value for key, value in state.items() if key in before})

    with pytest.raises(CheckpointError, match=rf'(?s)nothing was loaded: RuntimeError: .*named "{name}"'):
        trainer.load_checkpoint(path)

    assert has(trainer, before)


@pytest.mark.parametrize("build", [Growing, Resizing])
def test_state_whose_shape_is_that_of_what_was_seen(
    make_trainer: MakeTrainer, build: Callable[[], nn.Module]
) -> None:
    """A model whose saved state grows with each batch can be resumed."""
    first = make_trainer(model=build())
    first.train()

    second = make_trainer(model=build(), max_epochs=3)
    second.resume()

    own, saved = second.model.state_dict(), first.model.state_dict()
    assert all(torch.equal(own[name], saved[name]) for name in saved)
    second.train()
