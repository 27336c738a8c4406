"""Test `changed="apply"` with options of the optimizer that the checkpoint's run did not have."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError, load_checkpoint
from tests.support.interrupted import assert_same
from tests.support.trainers import MakeTrainer, batches, tiny_model


class OwnOptimizer(torch.optim.Optimizer):
    """A user's optimizer, which makes the state of its option with the first state of a parameter."""

    def __init__(self, parameters: Any, lr: float = 0.1, smooth: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "smooth": smooth})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step along the gradient, or along its mean."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["n"] = 0
                    if group["smooth"]:
                        state["mean"] = torch.zeros_like(p)
                state["n"] += 1
                gradient = state["mean"].lerp_(p.grad, 0.1) if group["smooth"] else p.grad
                p.sub_(gradient, alpha=group["lr"])


class Forwarding(torch.optim.Optimizer):
    """A wrapper as accelerate's: everything is the inner optimizer's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state."""
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the inner optimizer."""
        self.optimizer.step()


class TwoStep(Forwarding):
    """A wrapper with groups and a state of its own, as Lookahead's, around a wrapper."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(Forwarding(inner))
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]


class Counting(torch.optim.Optimizer):
    """A user's optimizer that steps what it holds outside its groups."""

    def __init__(self, parameters: Any, lr: float = 0.1, smooth: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "smooth": smooth})
        self.steps: list[int] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Count, and store a state."""
        self.steps.append(1)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["n"] = len(self.steps)


def build(make_trainer: MakeTrainer, work_dir: Path, kind: Any, **options: Any) -> Trainer:
    """Return a trainer whose optimizer has some options, by name."""
    model = tiny_model()
    model[2].p = 0.0  # type: ignore[index]
    optimizer = {"net": kind(model.parameters(), lr=0.01, **options)}
    return make_trainer(model=model, optimizer=optimizer, work_dir=work_dir, max_epochs=4)


NEEDS = [
    (torch.optim.Adam, "amsgrad", True, "max_exp_avg_sq"),
    (torch.optim.AdamW, "amsgrad", True, "max_exp_avg_sq"),
    (torch.optim.RMSprop, "centered", True, "grad_avg"),
    (torch.optim.RMSprop, "momentum", 0.9, "momentum_buffer"),
    (OwnOptimizer, "smooth", True, "mean"),
]


@pytest.mark.parametrize(("kind", "option", "value", "key"), NEEDS)
def test_an_option_that_needs_a_state(
    make_trainer: MakeTrainer, tmp_path: Path, kind: Any, option: str, value: Any, key: str
) -> None:
    """It is refused with its name and that of the state, nothing is loaded, and "keep" goes on without it."""
    build(make_trainer, tmp_path, kind).train()
    trainer = build(make_trainer, tmp_path, kind, **{option: value})
    before = copy.deepcopy((trainer.optimizer["net"].state_dict(), trainer.model.state_dict()))

    with pytest.raises(
        CheckpointError,
        match=rf"net {option}: \S+ in the checkpoint, {value} in this trainer: {kind.__name__} needs the state '{key}'",
    ):
        trainer.resume("epoch_2", changed="apply")

    assert_same((trainer.optimizer["net"].state_dict(), trainer.model.state_dict()), before)
    trainer.resume("epoch_2", changed="keep")
    trainer.train()
    assert trainer.optimizer["net"].param_groups[0][option] in (False, 0)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"weight_decay": 0.1, "foreach": True}),
        (torch.optim.Adam, {"maximize": True}),
        (torch.optim.Adam, {"fused": True}),
    ],
    ids=["momentum", "decay", "maximize", "fused"],
)
def test_an_option_that_needs_none(
    make_trainer: MakeTrainer, tmp_path: Path, kind: Any, options: dict[str, Any]
) -> None:
    """It is applied, and the weights are bitwise those of PyTorch's optimizer with the option set by hand."""
    model = tiny_model()
    model[2].p = 0.0  # type: ignore[index]
    optimizer = kind(model.parameters(), lr=0.01)
    for step, (inputs, target) in enumerate(batches(3) * 4):
        if step == 6:
            optimizer.param_groups[0].update(options)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
    build(make_trainer, tmp_path, kind).train()
    trainer = build(make_trainer, tmp_path, kind, **options)

    trainer.resume("epoch_2", changed="apply")
    trainer.train()

    assert_same(trainer.model.state_dict(), model.state_dict())


@pytest.mark.parametrize("wrapper", [Forwarding, TwoStep])
@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}], ids=["needs", "needs none"])
def test_a_wrapped_optimizer_is_not_stepped(
    make_trainer: MakeTrainer, tmp_path: Path, wrapper: Any, options: dict[str, Any]
) -> None:
    """The inner optimizer's missing state is named, and no real parameter, state or step count changes."""

    def wrapped(parameters: Any, **given: Any) -> Any:
        return wrapper(torch.optim.Adam(parameters, **given))

    build(make_trainer, tmp_path, wrapped).train()
    trainer = build(make_trainer, tmp_path, wrapped, **options)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    stepped: list[Any] = []
    inner = trainer.optimizer["net"]
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    inner.register_step_post_hook(lambda *given: stepped.append(given))
    before = copy.deepcopy((inner.state_dict(), trainer.model.state_dict()))

    if "amsgrad" in options:
        with pytest.raises(CheckpointError, match=r"net amsgrad: .* Adam needs the state 'max_exp_avg_sq'"):
            trainer.resume("epoch_2", changed="apply")
        assert_same((inner.state_dict(), trainer.model.state_dict()), before)
    else:
        trainer.resume("epoch_2", changed="apply")
        assert {int(state["step"]) for state in inner.state.values()} == {6}
        saved = load_checkpoint(tmp_path / "epoch_2")
        assert_same(dict(trainer.model.state_dict()), saved["state_dict"])
    assert not stepped


def test_an_optimizer_that_holds_more_is_not_stepped(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """The step of a user's optimizer that could change more than its groups is not called by a resume."""
    build(make_trainer, tmp_path, Counting).train()
    trainer = build(make_trainer, tmp_path, Counting, smooth=True)

    trainer.resume("epoch_2", changed="apply")

    assert trainer.optimizer["net"].steps == []
