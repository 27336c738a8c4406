"""Test that a param group which comes with a resume has the rate that its schedule gives at that step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_lr

from eventloop import Trainer
from eventloop.optim.schedulers import CosineAnnealingLR, LinearLR
from tests.support.interrupted import stop_after
from tests.support.trainers import MakeTrainer

SCHEDULES: dict[str, Callable[[Any], list[Any]]] = {
    "cosine": lambda o: [torch_lr.CosineAnnealingLR(o, 4)],
    "one rate each": lambda o: [torch_lr.LambdaLR(o, lambda step: 0.5**step)],
    "milestones": lambda o: [torch_lr.MultiStepLR(o, [1, 3], gamma=0.1)],
    "chained": lambda o: [
        torch_lr.SequentialLR(
            o, [torch_lr.LinearLR(o, 0.1, total_iters=2), torch_lr.ExponentialLR(o, 0.9)], [2]
        )
    ],
    "warm-up by iterations": lambda o: [
        LinearLR(o, start_factor=0.1, begin=0, end=9, by_epoch=False),
        CosineAnnealingLR(o, T_max=12, begin=9, end=24, by_epoch=False),
    ],
}


def build(make_trainer: MakeTrainer, work_dir: Path, schedule: str, *rates: float) -> Trainer:
    """Return a trainer of two layers, of which those with a rate train, each in a group of its own."""
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
    layers = [model[1], model[0]][-len(rates) :]
    optimizer = torch.optim.SGD(
        [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(layers, rates, strict=True)]
    )
    return make_trainer(
        model=model,
        optimizer=optimizer,
        schedulers=SCHEDULES[schedule](optimizer),
        work_dir=work_dir,
        max_epochs=8,
    )


def rates_of(trainer: Trainer) -> list[list[float]]:
    """Train to the end, and return the rates of each iteration."""
    seen: list[list[float]] = []

    def record(trainer: Trainer, event: Any) -> None:
        seen.append([group["lr"] for group in trainer.optimizer.param_groups])

    trainer.bus.subscribe(record, "before_train_iter", priority="LOWEST")
    trainer.train()
    return seen


@pytest.mark.parametrize("changed", ["keep", "apply"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_new_group_has_the_rate_of_its_schedule(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, schedule: str, changed: Any
) -> None:
    """From the resume on both groups have the rates of a run that has had them from its beginning."""
    whole = rates_of(build(make_trainer, tmp_path / "whole", schedule, 0.5, 0.01))
    first = build(make_trainer, tmp_path / "run", schedule, 0.01)
    stop_after(first, 6)
    first.train()

    trainer = build(make_trainer, tmp_path / "run", schedule, 0.5, 0.01)
    trainer.resume(changed=changed)

    assert rates_of(trainer) == [pytest.approx(rates) for rates in whole[6:]]
    assert "lr of param group 0: " in caplog.text
    assert "lr of param group 1: " not in caplog.text


def _move(trainer: Trainer, event: Any) -> None:
    trainer.optimizer.param_groups[0]["lr"] = 0.7


def test_a_rate_that_a_handler_moved_is_left_to_it(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A new group changes nothing of the others."""
    first = build(make_trainer, tmp_path, "one rate each", 0.01)
    stop_after(first, 6)
    first.bus.subscribe(_move, "after_train_epoch", priority=0)
    first.train()
    trainer = build(make_trainer, tmp_path, "one rate each", 0.5, 0.01)

    trainer.resume(changed="apply")

    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.5 * 0.5**6, 0.7]
