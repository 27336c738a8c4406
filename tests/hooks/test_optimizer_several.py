"""Several optimizers by name: stepped together, clipped each, saved, resumed and logged by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError
from eventloop.events import ScalarsLogged
from eventloop.hooks import CheckpointHook, OptimizerHook

Batches = Callable[[int], list[tuple[torch.Tensor, torch.Tensor]]]
MakeTrainer = Callable[..., Trainer]


def pair(**rates: float) -> tuple[torch.nn.Module, dict[str, torch.optim.Optimizer]]:
    """Two layers, the first with an SGD of its own, the second with an Adam; names and rates may be given."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    (first, first_lr), (second, second_lr) = (rates or {"body": 0.125, "head": 0.01}).items()
    return model, {
        first: torch.optim.SGD(model[0].parameters(), lr=first_lr, momentum=0.9),
        second: torch.optim.Adam(model[1].parameters(), lr=second_lr),
    }


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """To the last bit."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("max_norm", [None, 0.1], ids=["unclipped", "clipped"])
def test_one_loss_trains_all(
    make_trainer: MakeTrainer, make_batches: Batches, max_norm: float | None
) -> None:
    """All are zeroed, clipped each by itself, and stepped, as in the hand-written loop to the last bit."""
    model, optimizers = pair()
    hook = OptimizerHook(grad_clip=None if max_norm is None else {"max_norm": max_norm})
    make_trainer(model=model, optimizer=optimizers, hooks=[hook], max_epochs=2).train()

    twin, by_hand = pair()
    for _ in range(2):
        for inputs, target in make_batches(4):
            for optimizer in by_hand.values():
                optimizer.zero_grad()
            F.mse_loss(twin(inputs), target).backward()
            for optimizer in by_hand.values():
                if max_norm is not None:
                    clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm)
                optimizer.step()

    assert same_weights(model, twin)


def test_norm_is_put_by_name(make_trainer: MakeTrainer) -> None:
    """Each optimizer's norm has a metric of its own."""
    model, optimizers = pair()
    trainer = make_trainer(
        model=model, optimizer=optimizers, hooks=[OptimizerHook(grad_clip={"max_norm": 1})]
    )

    trainer.train()

    assert {"grad_norm/body", "grad_norm/head"} <= trainer.metrics.latest().keys()
    assert "grad_norm" not in trainer.metrics.latest()


def test_rate_is_logged_by_name(
    make_trainer: MakeTrainer, record_scalars: Callable[[Trainer], list[ScalarsLogged]]
) -> None:
    """`lr/<name>` is the rate of that optimizer, moved by its own scheduler."""
    model, optimizers = pair()
    schedulers = [StepLR(optimizers["body"], 1, gamma=0.5), StepLR(optimizers["head"], 1, gamma=0.1)]
    logger = {"logger": {"type": "LoggerHook", "interval": 1}}
    trainer = make_trainer(
        model=model, optimizer=optimizers, schedulers=schedulers, batches=2, default_hooks=logger
    )
    seen = record_scalars(trainer)

    trainer.train()

    rates = [(event.scalars["lr/body"], event.scalars["lr/head"]) for event in seen]
    assert rates == [(0.125, 0.01), (0.0625, pytest.approx(0.001))]
    assert all("lr" not in event.scalars for event in seen)


def test_resumed_run_equals_the_uninterrupted_one(make_trainer: MakeTrainer) -> None:
    """The state of each is saved under its name and given back, whatever the order of the mapping."""
    model, optimizers = pair()
    make_trainer(model=model, optimizer=optimizers, max_epochs=2).train()
    half, half_optimizers = pair()
    make_trainer(model=half, optimizer=half_optimizers, hooks=[CheckpointHook(1)], max_epochs=1).train()

    rest, rest_optimizers = pair()
    reversed_order = dict(reversed(rest_optimizers.items()))
    trainer = make_trainer(model=rest, optimizer=reversed_order, hooks=[CheckpointHook(1)], max_epochs=2)
    trainer.resume()
    trainer.train()

    assert same_weights(rest, model)


def test_checkpoint_of_other_names_is_refused(make_trainer: MakeTrainer) -> None:
    """Names and classes must be those of the trainer."""
    model, optimizers = pair()
    make_trainer(model=model, optimizer=optimizers, hooks=[CheckpointHook(1)]).train()
    model, optimizers = pair(generator=0.1, critic=0.1)
    trainer = make_trainer(model=model, optimizer=optimizers, hooks=[CheckpointHook(1)])

    with pytest.raises(
        CheckpointError, match=r"another optimizer: \{'body': 'SGD', .*, the trainer has \{'generator': 'SGD'"
    ):
        trainer.resume()


def test_checkpoint_of_one_optimizer_is_refused(make_trainer: MakeTrainer) -> None:
    """One optimizer is not several."""
    model, _ = pair()
    make_trainer(model=model, hooks=[CheckpointHook(1)]).train()
    model, optimizers = pair()
    trainer = make_trainer(model=model, optimizer=optimizers, hooks=[CheckpointHook(1)])

    with pytest.raises(
        CheckpointError,
        match=r"another optimizer: SGD, the trainer has \{'body': 'SGD'.*give it that one, or",
    ):
        trainer.resume()


def test_checkpoint_of_other_groups_is_refused(make_trainer: MakeTrainer) -> None:
    """The optimizer whose parameter groups differ is named, and nothing was touched."""
    model, optimizers = pair()
    make_trainer(model=model, optimizer=optimizers, hooks=[CheckpointHook(1)]).train()
    model, optimizers = pair()
    optimizers["head"] = torch.optim.Adam([{"params": [p]} for p in model[1].parameters()])  # type: ignore[index]
    trainer = make_trainer(model=model, optimizer=optimizers, hooks=[CheckpointHook(1)])
    before = [p.clone() for p in model.parameters()]

    with pytest.raises(
        CheckpointError,
        match=r"of 'head' its parameter groups have \[2\] parameters, the trainer's \[1, 1\]",
    ):
        trainer.resume()

    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


ONE = torch.optim.SGD([torch.zeros(1)], lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        (
            {},
            ValueError,
            r"optimizer is an empty mapping: pass one optimizer, a dict\(name=optimizer\), or None",
        ),
        ({"g": "SGD"}, TypeError, r"optimizer\['g'\] must be a torch.optim.Optimizer, got 'SGD'"),
        ({"g": torch.optim.SGD}, TypeError, r"optimizer\['g'\] must be a torch.optim.Optimizer, got <class"),
        ({0: ONE}, TypeError, "the names of optimizers must be .*got 0"),
        ({"": ONE}, TypeError, "the names of optimizers must be .*got ''"),
        (
            {"g": ONE, "d": ONE},
            ValueError,
            r"two of the optimizers \['d', 'g'\] are one object.*stepped twice",
        ),
        ([ONE], TypeError, r"optimizer must be a torch.optim.Optimizer, got \["),
    ],
)
def test_what_is_no_optimizer_is_refused(
    make_trainer: MakeTrainer, optimizer: Any, error: type[Exception], message: str
) -> None:
    """The error comes when the trainer is built, and names the entry."""
    with pytest.raises(error, match=message):
        make_trainer(optimizer=optimizer)
