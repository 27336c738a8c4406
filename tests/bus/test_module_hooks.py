"""PyTorch's module hooks, subscribed to on the bus."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from eventloop import SkipIteration, Trainer
from eventloop.bus import Bus
from tests.support.inside_torch import module_hooks
from tests.support.trainers import MakeTrainer, batches


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])
        self.head = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def hooks_of(model: nn.Module) -> int:
    return sum(module_hooks(model))


@pytest.fixture
def trainer(make_trainer: MakeTrainer) -> Trainer:
    model = Net()
    return make_trainer(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_loader=batches(6),
        max_epochs=1,
        train_step=lambda trainer, batch: trainer.model(batch[0]).square().mean(),
    )


def test_forward_hook_fires_in_the_iterations_that_are_due(trainer: Trainer) -> None:
    """With `every` the hook sees those iterations; in all others the modules carry none."""
    seen: list[int] = []
    installed: list[int] = []

    @trainer.bus.on_module(trainer.model, "layers.*", "forward", every=3)
    def inspect(module: nn.Module, inputs: Any, outputs: Any) -> None:
        seen.append(trainer.iter)

    trainer.bus.subscribe(
        lambda trainer, event: installed.append(hooks_of(trainer.model)),
        "before_train_iter",
        priority="LOWEST",
    )
    trainer.train()

    assert seen == [2, 2, 5, 5]
    assert installed == [0, 0, 2, 0, 0, 2]
    assert hooks_of(trainer.model) == 0


def test_backward_hook_sees_gradients(trainer: Trainer) -> None:
    """A backward hook fires within the optimizer hook's backward, and is gone after the iteration."""
    shapes: list[tuple[str, torch.Size]] = []

    @trainer.bus.on_module(trainer.model, "head", "backward", every=6)
    def inspect(name: str, module: nn.Module, grad_inputs: Any, grad_outputs: Any) -> None:
        shapes.append((name, grad_outputs[0].shape))

    trainer.train()

    assert shapes == [("head", torch.Size([len(batches(6)[0][0]), 1]))]
    assert hooks_of(trainer.model) == 0


def test_evaluation_is_not_looked_at(trainer: Trainer, make_trainer: MakeTrainer) -> None:
    """The hooks are on during training's own forward pass alone; what they return does not change its output."""
    seen: list[bool] = []
    trainer.val_loader = batches(2)

    @trainer.bus.on_module(trainer.model, "head")
    def inspect(module: nn.Module, inputs: Any, outputs: Any) -> torch.Tensor:
        seen.append(module.training)
        return torch.zeros(1)

    trainer.bus.subscribe(lambda trainer, event: trainer.model(torch.zeros(1, 2)), "after_train_iter")

    trainer.train()

    assert seen == [True] * 6


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("head", ["head"]),
        ("layers.*", ["layers.0", "layers.1"]),
        ("layers.*.0", ["layers.0.0", "layers.1.0"]),
        ("layers.0.**", ["layers.0", "layers.0.0", "layers.0.1"]),
        ("**.1", ["layers.0.1", "layers.1", "layers.1.1"]),
        (["head", "layers.1"], ["head", "layers.1"]),
    ],
)
def test_patterns(pattern: str | list[str], expected: list[str]) -> None:
    """`*` stands within one part of a name, `**` for any number of parts."""
    bus = Bus()
    subscription = bus.subscribe_module(lambda m, i, o: None, Net(), pattern)

    assert [*subscription.modules] == expected


def test_off_and_cancel_end_it(trainer: Trainer) -> None:
    """`bus.off(fn)` works as for any handler, in mid-iteration too; so does the subscription's own `cancel`."""
    seen: list[str] = []

    def inspect(module: nn.Module, inputs: Any, outputs: Any) -> None:
        seen.append("inspect")
        trainer.bus.off(inspect)

    trainer.bus.on_module(trainer.model, "head")(inspect)
    with trainer.bus.subscribe_module(lambda m, i, o: seen.append("other"), trainer.model, "head") as other:
        pass
    trainer.train()

    assert seen == ["inspect"]
    assert not other.installed
    with pytest.raises(ValueError, match="inspect is not subscribed to this bus"):
        trainer.bus.off(inspect)


def test_a_skipped_iteration_leaves_no_hook(trainer: Trainer) -> None:
    """An iteration skipped after all has no hook left on the modules for the next one."""
    seen: list[int] = []
    trainer.bus.on_module(trainer.model, "head", every=2)(lambda m, i, o: seen.append(trainer.batch_idx))

    def skip(trainer: Trainer, event: Any) -> None:
        if event.batch_idx == 1:
            raise SkipIteration

    trainer.bus.subscribe(skip, "before_train_iter", priority="VERY_LOW")
    trainer.train()

    assert seen == [2, 4]
    assert hooks_of(trainer.model) == 0


def fails(module: nn.Module, inputs: Any, outputs: Any) -> None:
    raise RuntimeError("too much")


def test_an_error_in_a_step_leaves_no_hook(trainer: Trainer) -> None:
    """A forward pass that raises leaves the modules as they were."""
    trainer.bus.on_module(trainer.model, "head")(fails)
    with pytest.raises(RuntimeError, match="too much"):
        trainer.train()

    assert hooks_of(trainer.model) == 0


async def later(a: Any, b: Any, c: Any) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "options", "fn", "message"),
    [
        ((nn.Linear, "head"), {}, print, "bus.on_module needs a torch.nn.Module, got <class"),
        ((Net(), "heat"), {}, print, "no module of Net matches 'heat': did you mean 'head'"),
        ((Net(), []), {}, print, r"no module is chosen: the pattern is \[\]; pass the name of a module"),
        (
            (nn.Linear(2, 1), "*"),
            {},
            print,
            r"no module of Linear matches '\*': it contains no modules; pass the",
        ),
        (
            (Net(), "head", "foward"),
            {},
            print,
            "kind must be 'forward' or 'backward', got 'foward': did you mean 'forward'",
        ),
        (
            (Net(), "head", "backward"),
            {},
            lambda a, b: None,
            r"write it as \(module, grad_inputs, grad_outputs\)",
        ),
        ((Net(), "head"), {}, later, "later is a coroutine function: a module hook"),
        ((Net(), "head"), {"every": 0}, lambda m, i, o: None, "every must be"),
    ],
)
def test_bad_arguments(arguments: Any, options: dict[str, Any], fn: Any, message: str) -> None:
    """Refused at the line that registers."""
    with pytest.raises((TypeError, ValueError), match=message):
        Bus().on_module(*arguments, **options)(fn)
