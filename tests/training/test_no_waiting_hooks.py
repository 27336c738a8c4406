"""The training thread asks no tensor for its value: schedules, timers, statistics, module hooks and images, one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from eventloop import hooks
from eventloop.hooks import ActivationStats, IterationTimer, LoggerHook, PeriodicWriter, VisualizationHook
from eventloop.metrics.reduce import Reducer
from eventloop.writers import JSONLWriter
from tests.support.internals import substitute
from tests.support.meeting import Meeting, Present
from tests.support.reading import Reads, waits_between
from tests.support.trainers import MakeTrainer, tiny_model

WARM: dict[str, Any] = {"by_epoch": False, "warmup": "linear", "warmup_iters": 2}
SCHEDULES: dict[str, Callable[[SGD], list[Any]]] = {
    "LRScheduler": lambda sgd: [hooks.LRScheduler(scheduler=StepLR(sgd, 3))],
    "Fixed": lambda sgd: [hooks.FixedLrUpdaterHook(**WARM)],
    "Step": lambda sgd: [
        hooks.StepLrUpdaterHook([1], warmup="exp", warmup_iters=4),
        hooks.StepMomentumUpdaterHook(2, **WARM, warmup_ratio=0.95),
    ],
    "Exp": lambda sgd: [hooks.ExpLrUpdaterHook(0.9, **WARM)],
    "Inv": lambda sgd: [hooks.InvLrUpdaterHook(0.5, **WARM)],
    "Poly": lambda sgd: [hooks.PolyLrUpdaterHook(0.9, **WARM)],
    "CosineAnnealing": lambda sgd: [
        hooks.CosineAnnealingLrUpdaterHook(0.01, **WARM),
        hooks.CosineAnnealingMomentumUpdaterHook(0.5, by_epoch=False),
    ],
    "LinearAnnealing": lambda sgd: [
        hooks.LinearAnnealingLrUpdaterHook(0.01, **WARM),
        hooks.LinearAnnealingMomentumUpdaterHook(0.5, by_epoch=False),
    ],
    "FlatCosineAnnealing": lambda sgd: [hooks.FlatCosineAnnealingLrUpdaterHook(0.5, 0.01, **WARM)],
    "CosineRestart": lambda sgd: [hooks.CosineRestartLrUpdaterHook([3, 3], [1, 0.5], 0.01, **WARM)],
    "Cyclic": lambda sgd: [
        hooks.CyclicLrUpdaterHook(cyclic_times=2),
        hooks.CyclicMomentumUpdaterHook(cyclic_times=2),
    ],
    "OneCycle": lambda sgd: [hooks.OneCycleLrUpdaterHook(0.5), hooks.OneCycleMomentumUpdaterHook()],
}


def train_with(
    make_trainer: MakeTrainer, reads: Reads, schedule: Callable[[SGD], list[Any]], *, rate: Any = 0.125
) -> tuple[list[str], set[tuple[float, float]]]:
    """What two epochs of three iterations wait for, and the rates and momenta they had."""
    model = tiny_model()
    optimizer = SGD(model.parameters(), lr=rate, momentum=0.5)
    trainer = make_trainer(
        model=model,
        optimizer=optimizer,
        hooks=[*schedule(optimizer), LoggerHook(interval=1)],
        default_hooks={"checkpoint": None},
    )
    had: list[Any] = []

    def record(event: Any) -> None:
        (group,) = optimizer.param_groups
        had.append((group["lr"] * 1, group["momentum"]))

    trainer.bus.subscribe(record, "before_optimizer_step")
    with waits_between(trainer, reads, "before_train", "after_train") as waits:
        trainer.train()
    return waits, {(float(lr), float(momentum)) for lr, momentum in had}


@pytest.mark.representative(2)
@pytest.mark.parametrize("in_a_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_read_no_tensor(
    make_trainer: MakeTrainer, reads: Reads, name: str, in_a_tensor: bool
) -> None:
    """No policy of a rate or a momentum, nor detectron2's scheduler hook, waits for anything, though it moves them. A rate
    that is a tensor is filled and logged unread: SGD reads it as often as in a training without a schedule."""
    rate = torch.tensor(0.125) if in_a_tensor else 0.125
    alone: list[str] = []
    if in_a_tensor:
        alone, _ = train_with(make_trainer, reads, lambda sgd: [], rate=rate.clone())  # type: ignore[union-attr]

    waits, had = train_with(make_trainer, reads, SCHEDULES[name], rate=rate)

    assert Counter(waits) == Counter(alone)
    assert len(had) > 1


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    "hooks",
    [
        [IterationTimer(warmup_iter=2)],
        [PeriodicWriter([JSONLWriter()], period=2)],
        [PeriodicWriter([JSONLWriter()], period=2, by_epoch=True)],
        [ActivationStats("*", interval=2, histogram=True), LoggerHook(interval=1)],
        [LoggerHook(interval=1, custom_cfg=[{"data_src": "loss", "window_size": 3}])],
    ],
    ids=["IterationTimer", "PeriodicWriter", "PeriodicWriter by epoch", "ActivationStats", "custom_cfg"],
)
def test_hooks_that_measure_read_no_tensor(
    make_trainer: MakeTrainer, reads: Reads, hooks: Sequence[Any]
) -> None:
    """What they put is a reference until it is read in the background."""
    trainer = make_trainer(hooks=[*hooks], default_hooks={"checkpoint": None})
    with (
        trainer.bus.capture("scalars_logged", "histogram_logged") as seen,
        waits_between(trainer, reads, "before_train", "after_train") as waits,
    ):
        trainer.train()

    assert waits == []
    assert seen


def test_reducing_over_ranks_reads_no_tensor(
    make_trainer: MakeTrainer, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread neither reads what is reduced nor waits for another rank, which never answers here."""
    meeting = Meeting(2)
    monkeypatch.setattr(Reducer, "begin_run", lambda reducer: reducer.join(Present(meeting, 0), 0))
    substitute(monkeypatch, "reduce.WAIT_SECONDS", 0.0)
    trainer = make_trainer(hooks=[LoggerHook(interval=1, reduce=True)], default_hooks={"checkpoint": None})
    with (
        trainer.bus.capture("scalars_logged") as seen,
        waits_between(trainer, reads, "before_train", "after_train") as waits,
    ):
        trainer.train()

    assert waits == []
    assert meeting.operations == ["largest"]
    assert len(seen) == 6


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_handlers_of_modules_read_no_tensor(make_trainer: MakeTrainer, reads: Reads, kind: Any) -> None:
    """`bus.on_module` hands tensors over as they are; what is put of them is not waited for."""
    trainer = make_trainer(hooks=[LoggerHook(interval=1)], default_hooks={"checkpoint": None})

    @trainer.bus.on_module(trainer.model, ["1", "3"], kind, every=2)
    def put_mean(name: str, module: torch.nn.Module, given: Any, made: Any) -> None:
        tensor = made[0] if isinstance(made, tuple) else made
        trainer.metrics.put_scalar(f"{kind}/{name}", tensor.detach().std())

    with waits_between(trainer, reads, "before_train", "after_train") as waits:
        trainer.train()

    assert waits == []
    assert len(trainer.metrics.history(f"{kind}/3")) == 3


def test_images_are_drawn_without_reading_a_tensor(make_trainer: MakeTrainer, reads: Reads) -> None:
    """A validation with images waits for what it does without: the metrics, once a pass."""
    images = [(torch.rand(2, 3, 4, 4) + n, torch.zeros(2)) for n in range(3)]
    trainer = make_trainer(
        hooks=[VisualizationHook(interval=1)],
        default_hooks={"checkpoint": None},
        val_loader=images,
        val_step=lambda trainer, batch: {"mean": batch[0].mean()},
    )
    with (
        trainer.bus.capture("image_logged") as seen,
        waits_between(trainer, reads, "before_val", "after_val") as waits,
    ):
        trainer.train()

    assert waits == ["tolist", "tolist"]
    assert len(seen) == 6


def test_a_handler_that_reads_is_seen(make_trainer: MakeTrainer, reads: Reads) -> None:
    """The tests above would notice: each read is counted, in every iteration."""
    trainer = make_trainer(default_hooks={"checkpoint": None})
    trainer.bus.subscribe(lambda trainer, event: float(trainer.outputs["loss"].detach()), "after_train_iter")

    with waits_between(trainer, reads, "before_train", "after_train") as waits:
        trainer.train()

    assert Counter(waits)["__float__"] == trainer.iter == 6
