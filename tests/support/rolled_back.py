"""Build trainers with every stateful part that go back, and the new processes' trainers to compare them with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from eventloop import Bus, Trainer
from eventloop.hooks import AmpOptimizerHook, CheckpointHook, EMAHook, OptimizerHook
from eventloop.training.loop_steps import SkipIteration
from tests.support.interrupted import Case, state_of

ITERS, INTERVAL = 40, 5


def build(
    case: Case, directory: Path, *, amp: bool = True, **options: Any
) -> tuple[Trainer, dict[int, float]]:
    """Return a trainer that saves every five iterations, and a dict that gets its losses by iteration."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    window: dict[str, Any] = {"cumulative_iters": case.cumulative_iters} if case.cumulative_iters > 1 else {}
    step = AmpOptimizerHook(dtype="bfloat16", **window) if amp else OptimizerHook(**window)
    trainer = Trainer(
        model,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        train_loader=case.loader(),
        hooks=[
            EMAHook(momentum=0.01),
            step,
            CheckpointHook(INTERVAL, by_epoch=False),
            *options.pop("hooks", []),
        ],
        schedulers=[torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * ITERS)],
        max_epochs=3 if case.by_epoch else None,
        max_iters=None if case.by_epoch else ITERS,
        work_dir=directory,
        bus=Bus(drain_timeout=60.0),
        limit_batches=case.limit,
        **options,
    )
    losses: dict[int, float] = {}
    trainer.bus.subscribe(
        lambda trainer, event: losses.update({event.iter: trainer.outputs["loss"].item()}), "after_train_iter"
    )
    return trainer, losses


def once(trainer: Trainer, event: str, iteration: int, do: Callable[[], object]) -> None:
    """Call a function in the first such event of an iteration."""
    calls: list[object] = []

    def call(trainer: Trainer, event: Any) -> None:
        if event.iter == iteration and not calls:
            calls.append(do())

    trainer.bus.subscribe(call, event, name=f"call {id(call)}")


def go_back(trainer: Trainer, after: int, path: str | None = None, skip: Any = 0) -> None:
    """Have a trainer go back after so many iterations, once."""
    once(trainer, "after_train_iter", after - 1, partial(trainer.rollback, path, skip))


def skip_by_hand(trainer: Trainer, batches: int) -> None:
    """Skip the next batches as a user's handler does."""
    left = [batches]

    def skip(trainer: Trainer, event: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise SkipIteration

    trainer.bus.subscribe(skip, "before_train_iter", name=f"skip {id(skip)}")


def final(trainer: Trainer) -> dict[str, Any]:
    """Return everything that changes the course of a training, at its end; close the trainer."""
    state = state_of(trainer)
    trainer.close()
    return state


def weights(trainer: Trainer) -> list[list[float]]:
    """Return the weights and buffers as numbers."""
    return [value.double().flatten().tolist() for value in trainer.model.state_dict().values()]
