"""LRScheduler: detectron2's and Pet's hook that says the learning rate and steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from eventloop import Trainer
from eventloop.events import ScalarsLogged
from eventloop.hooks import CheckpointHook, LoggerHook, LRScheduler, ParamSchedulerHook
from eventloop.hooks.lr_scheduler import representative_group

MakeTrainer = Callable[..., Trainer]
NO_LOGGER = {"logger": None}


def history(trainer: Trainer, name: str = "lr") -> list[tuple[float, int]]:
    """What was put under a name, with its iterations."""
    return list(trainer.metrics.history(name).values())


def linear(lr: float = 1.0) -> tuple[torch.nn.Module, SGD]:
    """A model and its optimizer."""
    model = torch.nn.Linear(2, 1)
    return model, SGD(model.parameters(), lr=lr)


def test_puts_the_rate_of_each_iteration_then_steps(make_trainer: MakeTrainer) -> None:
    """The value is the one the iteration was trained with."""
    model, optimizer = linear()
    hook = LRScheduler(optimizer, StepLR(optimizer, 1, 0.5))
    trainer = make_trainer(model=model, optimizer=optimizer, hooks=[hook], default_hooks=NO_LOGGER)

    trainer.train()

    assert history(trainer) == [(1.0, 0), (0.5, 1), (0.25, 2), (0.125, 3)]
    assert optimizer.param_groups[0]["lr"] == 0.0625


def test_takes_the_place_of_the_default_hook(make_trainer: MakeTrainer) -> None:
    """Nothing is stepped twice, also where the trainer has the schedulers."""
    model, optimizer = linear()
    schedulers = [StepLR(optimizer, 1, 0.5)]
    trainer = make_trainer(
        model=model,
        optimizer=optimizer,
        schedulers=schedulers,
        hooks=[LRScheduler()],
        default_hooks=NO_LOGGER,
    )

    trainer.train()

    assert [hook for hook in trainer.hooks if isinstance(hook, ParamSchedulerHook)] == [trainer.hooks[-1]]
    assert history(trainer)[-1] == (0.125, 3)


def test_same_scheduler_twice_is_one(make_trainer: MakeTrainer) -> None:
    """One given to the trainer and to the hook is stepped once."""
    model, optimizer = linear()
    scheduler = StepLR(optimizer, 1, 0.5)
    hook = LRScheduler(scheduler=scheduler)

    trainer = make_trainer(model=model, optimizer=optimizer, schedulers=[scheduler], hooks=[hook])

    assert trainer.schedulers == [scheduler]


def test_has_no_smoothing_hint(make_trainer: MakeTrainer) -> None:
    """What is logged is the rate, not a mean over the interval."""
    model, optimizer = linear()
    hook = LRScheduler(scheduler={"type": "StepLR", "step_size": 1, "gamma": 0.5, "by_epoch": False})
    trainer = make_trainer(model=model, optimizer=optimizer, hooks=[hook], default_hooks=NO_LOGGER)

    trainer.train()

    assert trainer.metrics.latest_with_smoothing_hint()["lr"] == (0.125, 3)


def test_several_optimizers_have_a_rate_each(make_trainer: MakeTrainer) -> None:
    """By their names."""
    model = torch.nn.Linear(2, 1)
    optimizer = {"a": SGD([model.weight], lr=1.0), "b": SGD([model.bias], lr=2.0)}
    trainer = make_trainer(
        model=model, optimizer=optimizer, hooks=[LRScheduler()], default_hooks=NO_LOGGER, batches=1
    )

    trainer.train()

    assert history(trainer, "lr/a") == [(1.0, 0)]
    assert history(trainer, "lr/b") == [(2.0, 0)]


def test_scheduler_is_saved_and_resumed(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """It is one of the trainer's."""

    def build() -> Trainer:
        model, optimizer = linear()
        return make_trainer(
            model=model,
            optimizer=optimizer,
            hooks=[LRScheduler(scheduler=StepLR(optimizer, 2, 0.5))],
            max_epochs=2,
            default_hooks={**NO_LOGGER, "checkpoint": CheckpointHook(interval=1, by_epoch=False)},
            work_dir=tmp_path,
        )

    first = build()
    first.bus.subscribe(
        lambda trainer, event: trainer.stop("enough"), "after_train_iter", start=2, priority=80, name="stop"
    )
    first.train()
    second = build()
    second.resume()

    second.train()

    assert [value for value, _ in history(second)] == [0.5, 0.25, 0.25, 0.125, 0.125]


def groups(*sizes_and_rates: tuple[int, float]) -> list[dict[str, Any]]:
    """Param groups of so many parameters with these rates."""
    return [{"params": [torch.zeros(1)] * size, "lr": rate} for size, rate in sizes_and_rates]


@pytest.mark.parametrize(
    ("given", "index"),
    [
        (groups((2, 1.0), (5, 2.0), (3, 3.0)), 1),
        (groups((2, 1.0), (2, 2.0)), 0),
        (groups((1, 1.0), (1, 2.0), (1, 2.0)), 1),
        (groups((1, 1.0), (1, 2.0)), 0),
    ],
    ids=["largest", "first of the largest", "most common", "first of as common"],
)
def test_representative_group(given: list[dict[str, Any]], index: int) -> None:
    """detectron2's heuristic."""
    assert representative_group(given) is given[index]


def test_most_common_rate_is_the_initial_one() -> None:
    """After a resume too, when the rates have moved."""
    given = groups((1, 0.1), (1, 0.1), (1, 0.7), (1, 0.6), (1, 0.5))
    for group, rate in zip(given, (1.0, 2.0, 3.0, 3.0, 3.0), strict=True):
        group["initial_lr"] = rate

    assert representative_group(given) is given[2]


def test_trainer_without_an_optimizer_is_refused(make_trainer: MakeTrainer) -> None:
    """There is no rate to put."""
    with pytest.raises(ValueError, match="LRScheduler has no optimizer to put the lr of"):
        make_trainer(optimizer=None, hooks=[LRScheduler()])


def test_what_is_no_scheduler_is_refused(make_trainer: MakeTrainer) -> None:
    """As by the default hook."""
    with pytest.raises(TypeError, match=r"must be PyTorch schedulers with a step\(\), got 'cosine'"):
        make_trainer(hooks=[LRScheduler(scheduler="cosine")])


def test_rate_is_logged_once(
    make_trainer: MakeTrainer, record_scalars: Callable[[Trainer], list[ScalarsLogged]]
) -> None:
    """Beside a hook that puts the rate, the logger adds none: one value an iteration."""
    model, optimizer = linear()
    hook = LRScheduler(scheduler=StepLR(optimizer, 1, 0.5))
    trainer = make_trainer(model=model, optimizer=optimizer, hooks=[hook, LoggerHook(interval=2)])
    seen = record_scalars(trainer)

    trainer.train()

    assert [(e.iter, e.scalars["lr"]) for e in seen if "lr" in e.scalars] == [
        (0, 1.0),
        (1, 0.5),
        (2, 0.25),
        (3, 0.125),
    ]


def test_the_optimizer_it_is_given_may_be_another(make_trainer: MakeTrainer) -> None:
    """A scheduler of an optimizer that is named here is not warned of."""
    _, optimizer = linear()
    scheduler = StepLR(optimizer, 1, 0.5)

    assert make_trainer(hooks=[LRScheduler(optimizer, scheduler)]).schedulers == [scheduler]
