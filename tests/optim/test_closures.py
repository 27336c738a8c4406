"""Optimizers whose step computes the loss again: refused with a train step to write, which trains as plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eventloop import Trainer
from eventloop.checkpoint import load_checkpoint
from eventloop.hooks import CheckpointHook, EMAHook
from tests.support.rolled_back import once
from tests.support.saving import same
from tests.support.trainers import MakeTrainer, batches, tiny_model

Parameters = Iterator[nn.Parameter]


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization (Foret et al. 2020) with the methods of the implementations in use."""

    def __init__(self, params: Parameters, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    def _each(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        return ((group, p) for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = torch.stack([p.grad.norm() for _, p in self._each() if p.grad is not None]).norm()
        for group, p in self._each():
            self.state[p]["old"] = p.clone()
            assert p.grad is not None
            p.add_(p.grad, alpha=group["rho"] / float(norm))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group, p in self._each():
            assert p.grad is not None
            p.copy_(self.state[p]["old"]).sub_(p.grad, alpha=group["lr"])
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            closure()
        self.second_step()


def lbfgs(params: Parameters) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=4)


KINDS = [pytest.param(lbfgs, id="LBFGS"), SAM]
Make = Callable[[Parameters], torch.optim.Optimizer]


def step_of(refused: TypeError) -> Any:
    """Run the train step of the error message, and return its function."""
    lines = str(refused).split("with\n")[1].splitlines()
    defined: dict[str, Any] = {"loss_fn": F.cross_entropy}
    exec("\n".join(line[2:] for line in lines), defined)
    return defined["train_step"]


def make(make_trainer: MakeTrainer, kind: Make, work_dir: Path) -> tuple[Trainer, list[float]]:
    """Make a trainer with the train step that the error message shows, and the list of its losses."""
    model = tiny_model()
    with pytest.raises(
        TypeError, match=r"optimizer: \w+\.step computes the loss again by a closure"
    ) as refused:
        make_trainer(model=model, optimizer=kind(model.parameters()))
    trainer = make_trainer(
        model=model,
        optimizer=kind(model.parameters()),
        train_step=step_of(refused.value),
        work_dir=work_dir,
        default_hooks={"optimizer": None},
        hooks=[CheckpointHook(1, by_epoch=False), EMAHook(momentum=0.5)],
    )
    losses: list[float] = []
    trainer.bus.on("after_train_iter")(lambda event: losses.append(float(trainer.outputs["loss"])))
    return trainer, losses


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_of_the_error_trains_as_plain_pytorch(
    make_trainer: MakeTrainer, tmp_path: Path, kind: Make
) -> None:
    """Losses and weights are those of a loop by hand, and each step is averaged."""
    trainer, losses = make(make_trainer, kind, tmp_path)
    trainer.train()

    model = tiny_model()
    optimizer, expected = kind(model.parameters()), list[float]()
    for x, y in batches(3) * 2:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss = closure() if kind is SAM else None
        found: Any = optimizer.step(closure)  # type: ignore[arg-type]
        expected.append((found if loss is None else loss).item())
    assert losses == expected
    assert same(trainer.model.state_dict(), model.state_dict())
    assert load_checkpoint(tmp_path / "iter_6")["hooks"]["EMAHook"]["steps"] == 6


@pytest.mark.parametrize("kind", KINDS)
def test_resume_and_rollback_continue_it(make_trainer: MakeTrainer, tmp_path: Path, kind: Make) -> None:
    """A run that goes back to a checkpoint, and one that is resumed from it, end with the uninterrupted run's weights."""
    whole, _ = make(make_trainer, kind, tmp_path / "whole")
    whole.train()

    back, losses = make(make_trainer, kind, tmp_path / "back")
    once(back, "after_train_iter", 4, lambda: back.rollback("iter_2"))
    back.train()
    resumed, _ = make(make_trainer, kind, tmp_path / "resumed")
    resumed.resume(tmp_path / "whole" / "iter_2")
    resumed.train()

    assert len(losses) > 6
    for trainer in (back, resumed):
        assert same(trainer.model.state_dict(), whole.model.state_dict())


class Asserts(torch.optim.SGD):
    """An optimizer that asserts its closure."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "give a closure"
        return super().step(closure)


class Raises(torch.optim.SGD):
    """An optimizer that raises an error without a closure, as AliG of pytorch_optimizer."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is None:
            raise ValueError("give a closure")
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


class Calls(torch.optim.SGD):
    """An optimizer that changes the weights, and then calls its closure unseen."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            torch._foreach_add_([p.data for p in group["params"]], 0.01)
        loss = closure()
        super().step()
        return loss


class Either(torch.optim.SGD):
    """An optimizer as most are: with a closure it calls it."""

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


class Passes(torch.optim.SGD):
    """An optimizer that refuses a closure, or passes on what it was given."""

    def step(self, *args: Any, **options: Any) -> Any:
        assert not args, "no closure"
        return super().step(*args, **options)


def trained(make_trainer: MakeTrainer, kind: type[torch.optim.SGD], **changes: Any) -> Any:
    """Return the weights that an optimizer trains."""
    model = tiny_model()
    make_trainer(model=model, optimizer=kind(model.parameters(), lr=0.1), writers=[], **changes).train()
    return model.state_dict()


@pytest.mark.parametrize("kind", [Asserts, Raises, Calls])
def test_a_step_that_needs_its_closure_by_its_source_is_refused(
    make_trainer: MakeTrainer, kind: type[torch.optim.SGD]
) -> None:
    """The trainer is not built, though the signature has None for the closure, and no weight changes."""
    model = tiny_model()
    message = rf"optimizer: {kind.__name__}\.step computes the loss again by a closure"
    with pytest.raises(TypeError, match=message):
        make_trainer(model=model, optimizer=kind(model.parameters(), lr=0.1))

    assert same(model.state_dict(), tiny_model().state_dict())


@pytest.mark.parametrize("kind", [Asserts, Raises])
def test_the_step_of_the_error_serves_these(
    make_trainer: MakeTrainer, tmp_path: Path, kind: type[torch.optim.SGD]
) -> None:
    """With the train step that the error message shows they train as plain SGD."""
    model = tiny_model()
    with pytest.raises(TypeError, match="by a closure") as refused:
        make_trainer(model=model, optimizer=kind(model.parameters(), lr=0.1))
    shown = {"train_step": step_of(refused.value), "default_hooks": {"optimizer": None}}

    assert same(
        trained(make_trainer, kind, work_dir=tmp_path / "closure", **shown),
        trained(make_trainer, torch.optim.SGD, work_dir=tmp_path / "plain"),
    )


@pytest.mark.parametrize("kind", [Either, Passes])
def test_a_step_that_may_have_a_closure_is_no_other(
    make_trainer: MakeTrainer, tmp_path: Path, kind: type[torch.optim.SGD]
) -> None:
    """The optimizer hook steps it, as plain SGD."""
    assert same(
        trained(make_trainer, kind, work_dir=tmp_path / "either"),
        trained(make_trainer, torch.optim.SGD, work_dir=tmp_path / "plain"),
    )


class Wrapper:
    """An object around an optimizer, without its class, as libraries and scripts write them."""

    def __init__(self, params: Parameters, lr: float = 0.1) -> None:
        self.optimizer = self._inside(params, lr)
        self.param_groups = self.optimizer.param_groups

    def _inside(self, params: Parameters, lr: float) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, lr=lr, max_iter=4)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class Given(Wrapper):
    """Its step has a closure."""

    def step(self, closure: Any) -> Any:
        return self.optimizer.step(closure)


class Passed(Wrapper):
    """Its step is that of the optimizer in it, an attribute."""

    def __init__(self, params: Parameters, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.step: Any = self.optimizer.step


class Called(Wrapper):
    """Its step calls its closure, by its source."""

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(lambda: closure())


class Function(Wrapper):
    """Its step is a function of the object, without `self`."""

    def __init__(self, params: Parameters, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.step: Any = lambda closure: self.optimizer.step(closure)


class Forwards(Wrapper):
    """Has all that it lacks from the optimizer in it, an implementation of SAM."""

    def _inside(self, params: Parameters, lr: float) -> torch.optim.Optimizer:
        return SAM(params, lr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


@pytest.mark.parametrize("kind", [Given, Passed, Called, Function, Forwards])
def test_a_wrapper_whose_step_needs_a_closure_is_refused(
    make_trainer: MakeTrainer, kind: type[Wrapper]
) -> None:
    """The trainer is not built with an object that has param groups, and is no `torch.optim.Optimizer`."""
    model = tiny_model()

    with pytest.raises(
        TypeError, match=rf"optimizer: {kind.__name__}\.step computes the loss again by a clo"
    ):
        make_trainer(model=model, optimizer=kind(model.parameters()))


@pytest.mark.parametrize("kind", [Given, Passed, Forwards])
def test_the_step_of_the_error_serves_wrappers(
    make_trainer: MakeTrainer, tmp_path: Path, kind: type[Wrapper]
) -> None:
    """With the train step that the error message shows they train as the optimizer in them."""
    inside = SAM if kind is Forwards else lbfgs
    weights: list[Any] = []
    for each in (kind, inside):
        model = tiny_model()
        with pytest.raises(TypeError, match="by a closure") as refused:
            make_trainer(model=model, optimizer=each(model.parameters()))
        shown: dict[str, Any] = {"train_step": step_of(refused.value), "default_hooks": {"optimizer": None}}
        optimizer = each(model.parameters())
        make_trainer(
            model=model, optimizer=optimizer, writers=[], work_dir=tmp_path / each.__name__, **shown
        ).train()
        weights.append(model.state_dict())

    assert same(*weights)
    assert not same(weights[0], tiny_model().state_dict())


class Simple(Wrapper):
    """Wraps SGD, and its step needs nothing."""

    def _inside(self, params: Parameters, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr)

    def step(self) -> None:
        self.optimizer.step()


class Partial(Simple):
    """Its step is a partial, which has no source."""

    def __init__(self, params: Parameters, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.step: Any = partial(self.optimizer.step, None)


class Scheduled(Simple):
    """Its step is the function that a scheduler puts in place of the step of the optimizer in it."""

    def __init__(self, params: Parameters, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)
        self.step: Any = self.optimizer.step


@pytest.mark.parametrize("kind", [Simple, Partial, Scheduled])
def test_a_wrapper_whose_step_needs_none_is_stepped(
    make_trainer: MakeTrainer, tmp_path: Path, kind: type[Wrapper]
) -> None:
    """The optimizer hook steps it, as plain SGD."""
    changes: list[Any] = [kind, torch.optim.SGD]

    wrapped, plain = (trained(make_trainer, each, work_dir=tmp_path / each.__name__) for each in changes)

    assert same(wrapped, plain)


@pytest.mark.parametrize("step", [None, max, "text"])
def test_a_step_without_a_signature_does_not_stop_the_check(make_trainer: MakeTrainer, step: Any) -> None:
    """Nothing is known of it before it is called."""
    model = tiny_model()
    wrapper: Any = Simple(model.parameters())
    wrapper.step = step

    assert make_trainer(model=model, optimizer=wrapper).optimizer is wrapper
