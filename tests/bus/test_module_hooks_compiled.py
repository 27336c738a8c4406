"""Module hooks of models that `torch.compile` made: they are called, and nothing is compiled anew for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from eventloop import Trainer
from eventloop.hooks import ActivationStats, PreciseBN
from tests.support.inside_torch import compiler_stance
from tests.support.trainers import MakeTrainer, batches


class Counting:
    """Compiles into nothing, and counts how often."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run


pytestmark = [  # dynamo's
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"),
]


class Whole(nn.Sequential):
    """Compiled in place, as PyTorch's own classes are not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self:
            x = part(x)
        return x


class Part(nn.Module):
    """The same, of a model that is not compiled otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.fixture
def backend() -> Iterator[Counting]:
    torch.compiler.reset()
    yield Counting()
    torch.compiler.reset()


def make(make_trainer: MakeTrainer, backend: Any, how: str = "whole", **options: Any) -> Trainer:
    inner: Any = Whole(nn.Linear(2, 3), nn.BatchNorm1d(3), Part())
    model, step = inner, lambda trainer, batch: trainer.model(batch[0]).square().mean()
    if how == "whole":
        model = torch.compile(inner, backend=backend)
    elif how == "in place":
        inner.compile(backend=backend)
    elif how == "part":
        inner[2].compile(backend=backend)
    else:
        step = torch.compile(step, backend=backend)
    return make_trainer(
        model=model,
        optimizer=torch.optim.SGD(inner.parameters(), lr=0.1),
        train_loader=batches(6),
        max_epochs=1,
        train_step=step,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("how", ["whole", "in place", "part", "step"])
def test_hooks_of_a_compiled_model_are_called(
    make_trainer: MakeTrainer, backend: Counting, how: str, kind: Any
) -> None:
    """In iterations that fire, what was compiled runs eagerly and calls them; all others run what was compiled once."""
    trainer, seen = make(make_trainer, backend, how), list[tuple[int, str]]()
    inner = getattr(trainer.model, "_orig_mod", trainer.model)

    @trainer.bus.on_module(inner, ["1", "2"], kind, every=3)
    def inspect(name: str, module: nn.Module, given: Any, made: Any) -> None:
        seen.append((trainer.iter, name))

    trainer.train()

    names = ["1", "2"] if kind == "forward" else ["2", "1"]
    assert seen == [(i, name) for i in (2, 5) for name in names]
    assert (backend.graphs, backend.calls) == (1, 4)
    assert compiler_stance() == "default"


def test_the_statistics_of_activations(make_trainer: MakeTrainer, backend: Counting) -> None:
    """ActivationStats has values of a compiled model."""
    trainer = make(make_trainer, backend, hooks=[ActivationStats("1", interval=3)])

    trainer.train()

    assert trainer.metrics.latest()["activation/1/mean"][1] == 5


def test_subscriptions_that_end_in_any_order(make_trainer: MakeTrainer, backend: Counting) -> None:
    """Several at once, of which one ends within its own hook, and a PreciseBN between: the compiler is told so once, and
    at the end what it was told before."""
    trainer, seen = make(make_trainer, backend, hooks=[PreciseBN(2, 2, by_epoch=False)]), list[Any]()
    inner: Any = next(trainer.model.children())

    def once(module: nn.Module, given: Any, made: Any) -> None:
        seen.append("once")
        trainer.bus.off(once)

    def within(trainer: Trainer, event: Any) -> None:
        seen.append((event.iter, compiler_stance()))

    trainer.bus.on_module(inner, "1", "forward", every=2)(lambda m, i, o: seen.append("forward"))
    trainer.bus.on_module(inner, "2", "backward", every=2)(lambda m, i, o: seen.append("backward"))
    trainer.bus.on_module(inner, "2", "forward", every=2)(once)
    trainer.bus.subscribe(within, "after_train_iter", priority=90)
    with torch.compiler.set_stance("eager_on_recompile"):
        trainer.train()
        after = compiler_stance()

    eager, other = "force_eager", "eager_on_recompile"
    fired = ["forward", "backward"]
    assert seen == [
        (0, other),
        "forward",
        "once",
        "backward",
        (1, eager),
        (2, other),
        *fired,
        (3, eager),
        (4, other),
        *fired,
        (5, eager),
    ]
    assert after == other


def test_an_error_in_the_step_ends_it(make_trainer: MakeTrainer, backend: Counting) -> None:
    """Where the forward pass fails, later ones run what was compiled."""
    trainer = make(make_trainer, backend)

    inner: Any = next(trainer.model.children())

    @trainer.bus.on_module(inner, "1")
    def inspect(module: nn.Module, given: Any, made: Any) -> None:
        raise RuntimeError("too much")

    with pytest.raises(RuntimeError, match="too much"):
        trainer.train()

    assert compiler_stance() == "default"
