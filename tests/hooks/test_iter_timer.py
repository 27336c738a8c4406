"""IterTimerHook: where the time of an iteration went."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from eventloop import SkipIteration, Trainer
from eventloop.events import ScalarsLogged
from eventloop.hooks import CallbackHook
from tests.hooks.conftest import Clock, Make, SlowLoader

DATA, FORWARD, BACKWARD, HOOK, VAL = 0.5, 0.25, 0.125, 2.0, 64.0
ITERATION = DATA + FORWARD + BACKWARD
VALIDATE = {"val_loader": [torch.zeros(1)], "val_interval": 9}


@pytest.fixture
def build(clock: Clock, make_trainer: Make, make_batches: Callable[[int], list[Any]]) -> Make:
    """Build trainers in which everything takes time on the clock, three batches an epoch."""

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        clock.advance(FORWARD)
        loss = F.mse_loss(trainer.model(batch[0]), batch[1])
        loss.register_hook(lambda gradient: clock.advance(BACKWARD))
        return loss

    def val_step(trainer: Trainer, batch: Any) -> dict[str, float]:
        clock.advance(VAL)
        return {"acc": 0.5}

    def make(*hooks: Any, batches: int = 3, **options: Any) -> Trainer:
        loader = SlowLoader(clock, DATA, make_batches(batches))
        return make_trainer(
            train_loader=loader, train_step=step, val_step=val_step, hooks=list(hooks), **options
        )

    return make


@pytest.fixture
def slow_hook(clock: Clock) -> CallbackHook:
    """A hook after the timer, as slow as a checkpoint."""
    return CallbackHook(after_train_iter=lambda event: clock.advance(HOOK), priority="VERY_LOW")


def put(trainer: Trainer, name: str) -> list[float]:
    """The values of a metric, iteration by iteration."""
    return [value for value, _ in trainer.metrics.history(name).values()]


def test_each_part_is_booked_where_it_was_spent(build: Make, slow_hook: CallbackHook) -> None:
    """The wait for a batch on its iteration; train step and optimizer hook as the step; a hook after the timer as hooks'
    time, not as data time of the next iteration. The parts add up exactly."""
    trainer = build(slow_hook)

    trainer.train()

    assert put(trainer, "data_time") == [DATA] * 3
    assert put(trainer, "step_time") == [FORWARD + BACKWARD] * 3
    assert put(trainer, "hook_time") == [0.0, HOOK, HOOK]
    assert put(trainer, "time") == [ITERATION, ITERATION + HOOK, ITERATION + HOOK]


def test_parts_add_up_on_the_real_clock(make_trainer: Make) -> None:
    """Measured, too, they add up, and none is negative."""
    trainer = make_trainer(batches=20)

    trainer.train()

    data, step, hook = (put(trainer, f"{part}_time") for part in ("data", "step", "hook"))
    assert put(trainer, "time") == pytest.approx([sum(parts) for parts in zip(data, step, hook, strict=True)])
    assert min(*data, *step, *hook) >= 0.0


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("unit", "hooks"),
    [
        ({"max_epochs": 2}, [0.0, HOOK, HOOK] * 2),  # between two epochs, too, nothing is booked
        ({"max_iters": 3, "val_interval": 1}, [0.0, HOOK, HOOK]),  # the hooks before a validation are
    ],
    ids=["epochs", "iters"],
)
def test_validation_in_between_belongs_to_none(
    build: Make, slow_hook: CallbackHook, clock: Clock, unit: dict[str, int], hooks: list[float]
) -> None:
    """Neither the validation after an epoch or iteration, nor slow handlers of before_val and after_val."""
    around = CallbackHook(
        before_val=lambda event: clock.advance(VAL), after_val=lambda event: clock.advance(VAL)
    )
    trainer = build(slow_hook, around, val_loader=[torch.zeros(1)], **unit)

    trainer.train()

    assert put(trainer, "hook_time") == hooks
    assert max(put(trainer, "time")) < VAL


@pytest.mark.representative(2)
@pytest.mark.representative(2)
@pytest.mark.parametrize("evaluate", ["val", "test"])
@pytest.mark.parametrize(
    ("where", "priority"),
    [
        ("after_train_iter", "HIGHEST"),
        ("after_train_iter", "VERY_LOW"),
        ("after_backward", "NORMAL"),
        ("before_train_iter", "NORMAL"),
    ],
)
def test_evaluation_inside_a_hook_belongs_to_none(
    build: Make, evaluate: str, where: str, priority: str
) -> None:
    """At whatever point of an iteration a hook asks for it, before or after the timer."""
    at: dict[str, Any] = {where: lambda trainer: getattr(trainer, evaluate)()}
    ask = CallbackHook(**at, priority=priority)
    trainer = build(ask, test_loader=[torch.zeros(1)], **VALIDATE)

    trainer.train()

    assert put(trainer, "time") == [ITERATION] * 3
    assert put(trainer, "hook_time") == [0.0] * 3
    assert trainer.costs().phases.wall == 3 * ITERATION


def test_validation_inside_a_hand_written_loop_belongs_to_none(build: Make) -> None:
    """`trainer.val()` in the body of the loop is no part of the step, and no part becomes negative."""
    trainer = build(**VALIDATE)

    for _ in trainer.epochs():
        for batch in trainer.batches(trainer.train_loader or []):
            trainer.outputs = trainer.train_step(batch)
            trainer.val()

    assert put(trainer, "step_time") == [FORWARD + BACKWARD] * 3
    assert put(trainer, "hook_time") == [0.0] * 3


def test_fetching_skipped_batches_is_data_time(build: Make) -> None:
    """The wait for a batch that `SkipIteration` drops is data time of the next one that is trained on."""

    def skip_first(event: Any) -> None:
        if event.batch_idx == 0:
            raise SkipIteration

    trainer = build(CallbackHook(before_train_iter=skip_first))
    trainer.train()

    assert put(trainer, "data_time") == [2 * DATA, DATA]
    assert put(trainer, "hook_time") == [0.0, 0.0]


def test_times_are_logged_as_means_of_the_interval(
    build: Make, slow_hook: CallbackHook, record_scalars: Callable[[Trainer], list[ScalarsLogged]]
) -> None:
    """Writers are given the mean over the logging interval."""
    trainer = build(slow_hook, batches=4)
    seen = record_scalars(trainer)

    trainer.train()

    assert [event.scalars["time"] for event in seen] == [ITERATION + HOOK * 3 / 4]
