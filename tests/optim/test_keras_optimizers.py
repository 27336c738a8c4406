"""Optimizers of Keras, refused with PyTorch's optimizer in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.saving import same
from tests.support.trainers import MakeTrainer, tiny_model


class Adam:
    """Has the methods of Keras 3's optimizers."""

    learning_rate = 0.1

    def apply(self, grads: Any, trainable_variables: Any = None) -> None: ...

    def apply_gradients(self, grads_and_vars: Any) -> None: ...


class Nadam(Adam):
    """Has another name in PyTorch."""


class Ftrl:
    """Has the method of older releases of Keras, and no counterpart in PyTorch."""

    def apply_gradients(self, grads_and_vars: Any) -> None: ...


def keras() -> Any:
    """Return an optimizer of Keras itself."""
    return pytest.importorskip("keras").optimizers.Adam(0.1)


KINDS = [
    (Adam, r"write torch\.optim\.Adam\(model\.parameters\(\), lr=\.\.\.\)"),
    (lambda: Adam, r"write torch\.optim\.Adam\(model\.parameters\(\), lr=\.\.\.\)"),
    (Nadam, r"write torch\.optim\.NAdam\(model\.parameters\(\), lr=\.\.\.\)"),
    (Ftrl, r"torch\.optim has no Ftrl, so write another, as torch\.optim\.AdamW\(model\.parameters\(\), lr="),
    pytest.param(keras, r"write torch\.optim\.Adam\(model\.parameters\(\), lr=", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("make", "code"), KINDS, ids=["one", "class", "other case", "none", "keras"])
def test_it_is_refused_with_the_counterpart(make_trainer: MakeTrainer, make: Any, code: str) -> None:
    """The error of the construction says what it is and what to write."""
    with pytest.raises(
        TypeError,
        match=rf"optimizer must be a torch\.optim\.Optimizer, got .*, an optimizer of Keras, .*: {code}",
    ):
        make_trainer(optimizer=make())


def test_one_of_several_is_refused_by_its_name(make_trainer: MakeTrainer) -> None:
    """The error has the name and the counterpart."""
    with pytest.raises(
        TypeError, match=r"optimizer\['g'\] must be .*of Keras, .*: write torch\.optim\.Adam\("
    ):
        make_trainer(optimizer={"g": Adam()})


def test_the_code_of_the_error_trains(make_trainer: MakeTrainer) -> None:
    """It makes an optimizer of the model, which the trainer steps."""
    model = tiny_model()
    with pytest.raises(TypeError, match="an optimizer of Keras") as refused:
        make_trainer(model=model, optimizer=Adam())
    code = str(refused.value).split("write ")[1].split("...")[0] + "0.1)"

    make_trainer(model=model, optimizer=eval(code, {"torch": torch, "model": model})).train()

    assert not same(model.state_dict(), tiny_model().state_dict())


@pytest.mark.parametrize("given", [tiny_model, lambda: torch.nn.Linear, lambda: "Adam"])
def test_other_objects_are_not_taken_for_one(make_trainer: MakeTrainer, given: Any) -> None:
    """A module has a method `apply` too, which is not that of an optimizer."""
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got ") as refused:
        make_trainer(optimizer=given())

    assert "Keras" not in str(refused.value)
