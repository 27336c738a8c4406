"""The optimizer's parameters are the model's, which is looked at when the trainer is built."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import orthogonal
from torch.optim import SGD

from eventloop.hooks import OptimizerHook
from tests.support.trainers import MakeTrainer, tiny_model

Made = tuple[nn.Module, Any]


def sgd(*owners: nn.Module) -> SGD:
    """An optimizer of all parameters of some modules."""
    return SGD([parameter for owner in owners for parameter in owner.parameters()], lr=0.1)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was warned of the optimizer's parameters."""
    return [
        r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "optimizer" in r.message
    ]


def test_another_model_set_later_is_refused(make_trainer: MakeTrainer) -> None:
    """A run whose optimizer has no parameter of `trainer.model` does not begin."""
    trainer = make_trainer()
    trainer.model = tiny_model()

    with pytest.raises(ValueError, match=r"optimizer has none of the model's 4 parameters"):
        trainer.train()

    assert trainer.iter == 0
    trainer.optimizer = sgd(trainer.model)
    trainer.train()


@pytest.mark.parametrize(
    "options",
    [{}, {"train_step": lambda trainer, batch: 0}, {"default_hooks": {"optimizer": OptimizerHook()}}],
    ids=["loss_fn", "train_step", "hook"],
)
@pytest.mark.parametrize(
    "optimizer", [sgd, lambda model: {"a": sgd(model), "b": sgd(tiny_model())}], ids=["one", "several"]
)
def test_optimizer_of_another_model_is_refused(
    make_trainer: MakeTrainer, optimizer: Callable[..., Any], options: dict[str, Any]
) -> None:
    """It would train nothing; the error says how to build it, and what to do where that is meant."""
    message = (
        r"optimizer has none of the model's 4 parameters: .*ModuleDict.*default_hooks=dict\(optimizer=None\)"
    )
    with pytest.raises(ValueError, match=message):
        make_trainer(optimizer=optimizer(tiny_model()), **options)


def loss_with(parameters: nn.Module) -> nn.Module:
    """A loss function with parameters."""

    class WithParameters(nn.CrossEntropyLoss):
        def __init__(self) -> None:
            super().__init__()
            self.inner = parameters

    return WithParameters()


def partly(model: nn.Module, other: nn.Module) -> dict[str, Any]:
    """Of both."""
    return {"optimizer": sgd(model, other)}


def in_turn(model: nn.Module, other: nn.Module) -> dict[str, Any]:
    """One each."""
    return {"optimizer": {"model": sgd(model), "critic": sgd(other)}}


def of_the_loss(model: nn.Module, other: nn.Module) -> dict[str, Any]:
    """Of the loss function alone, over a model that is frozen."""
    return {"optimizer": sgd(other), "loss_fn": loss_with(other)}


def by_hand(model: nn.Module, other: nn.Module) -> dict[str, Any]:
    """Of another module, which the user's own code steps."""
    return {"optimizer": sgd(other), "default_hooks": {"optimizer": None}}


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (partly, "2 of 6 are not"),
        (in_turn, r"2 of 2 are not in optimizer\['critic'\]"),
        (of_the_loss, "2 of 2 are not"),
        (by_hand, "2 of 2 are not"),
    ],
)
def test_parameters_of_other_modules_are_warned_of_once(
    make_trainer: MakeTrainer,
    caplog: pytest.LogCaptureFixture,
    options: Callable[..., dict[str, Any]],
    part: str,
) -> None:
    """They may be trained, as those of a loss or a critic, but no checkpoint has them."""
    model = tiny_model()

    make_trainer(model=model, **options(model, nn.Linear(3, 3)))

    said = warnings_of(caplog)
    assert len(said) == 1
    assert re.search(part + ".*No checkpoint has them", said[0])


def first(model: nn.Module) -> nn.Module:
    """The first layer of a model."""
    return next(model.children())


def whole() -> Made:
    model = tiny_model()
    return model, sgd(model)


def frozen() -> Made:
    model = tiny_model()
    first(model).requires_grad_(False)
    return model, sgd(model)


def part() -> Made:
    model = tiny_model()
    return model, sgd(first(model))


def compiled() -> Made:
    model = tiny_model()
    wrapped = torch.compile(model, backend="eager")
    assert isinstance(wrapped, nn.Module)
    return wrapped, sgd(model)


def converted() -> Made:
    model = tiny_model()
    optimizer = sgd(model)
    return model.double(), optimizer


def parametrized() -> Made:
    model = tiny_model()
    optimizer = sgd(model)
    orthogonal(first(model))
    return model, optimizer


def lazy() -> Made:
    model = nn.Sequential(nn.LazyLinear(3))
    optimizer = sgd(model)
    model(torch.ones(1, 2))
    return model, optimizer


def grows() -> Made:
    return tiny_model(), SGD([{"params": []}], lr=0.1)


class Copies:
    """A library's wrapper, which steps copies of the weights in another type."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups = [{"params": [p.detach().double() for p in model.parameters()], "lr": 0.1}]

    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def copies() -> Made:
    model = tiny_model()
    return model, Copies(model)


@pytest.mark.parametrize(
    "make", [whole, frozen, part, compiled, converted, parametrized, lazy, grows, copies]
)
def test_optimizer_of_the_model_is_accepted(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, make: Callable[[], Made]
) -> None:
    """Of a part, of a model that was compiled, converted or parametrized since, or of copies: nothing is said."""
    model, optimizer = make()

    make_trainer(model=model, optimizer=optimizer, device="cpu")

    assert warnings_of(caplog) == []


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")
@pytest.mark.parametrize(
    "wrap",
    [
        DistributedDataParallel,
        lambda model: FullyShardedDataParallel(model, use_orig_params=False, device_id=torch.device("cpu")),
        lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")),
    ],
    ids=["ddp", "fsdp", "fsdp with names"],
)
def test_distributed_models_are_accepted(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    """Wrapped, also with parameters that were flattened."""
    model = wrap(tiny_model())

    make_trainer(model=model, optimizer=sgd(model), default_hooks={"checkpoint": None})

    assert warnings_of(caplog) == []
