"""Schedulers that are not stepped as PyTorch's are refused when the trainer is built, with what to write in their place."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from tests.support.rolled_back import once
from tests.support.trainers import MakeTrainer, batches, tiny_model


class CosineLRScheduler:
    """A scheduler with timm's methods."""

    def __init__(self, optimizer: torch.optim.Optimizer, t_initial: int, t_in_epochs: bool = True) -> None:
        self.optimizer, self.t_initial, self.t_in_epochs = optimizer, t_initial, t_in_epochs

    def step(self, epoch: int, metric: float | None = None) -> None:
        if self.t_in_epochs:
            self._set(epoch)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        if not self.t_in_epochs:
            self._set(num_updates)

    def _set(self, t: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 * (1 + math.cos(math.pi * t / self.t_initial))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_timms_scheduler_is_refused_when_the_trainer_is_built(make_trainer: MakeTrainer) -> None:
    """The error has one handler for epochs and one for updates."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(TypeError, match=r"CosineLRScheduler\.step needs epoch") as refused:
        make_trainer(model=model, optimizer=optimizer, schedulers=[CosineLRScheduler(optimizer, 6)])

    assert "def step_by_epoch(trainer, event): scheduler.step(event.epoch)" in str(refused.value)
    assert "def step_by_iter(trainer, event): scheduler.step_update(event.iter + 1)" in str(refused.value)


def rates_of(trainer: Trainer) -> list[float]:
    """Return the list of the rates that a trainer uses, which grows as it trains."""
    used: list[float] = []

    def record_rate(trainer: Trainer, event: Any) -> None:
        used.append(trainer.optimizer.param_groups[0]["lr"])

    trainer.bus.subscribe(record_rate, "before_train_iter")
    return used


def timm(optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """Return timm's own scheduler."""
    module = pytest.importorskip("timm.scheduler")
    return module.CosineLRScheduler(optimizer, cycle_limit=1, **options)


def trainer_with_handlers(
    make_trainer: MakeTrainer, make: Callable[..., Any], by_epoch: bool, length: int, work_dir: Path
) -> tuple[Trainer, list[float]]:
    """Make a trainer with the handlers of the error message, and the list of the rates that it uses."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = make(optimizer, t_initial=length, t_in_epochs=by_epoch)
    with pytest.raises(TypeError) as refused:
        make_trainer(model=model, optimizer=optimizer, schedulers=[scheduler])
    trainer = make_trainer(
        model=model,
        optimizer=optimizer,
        train_loader=batches(3),
        work_dir=work_dir,
        hooks=[CheckpointHook(1, by_epoch=False)],
    )
    used = rates_of(trainer)
    code = "\n".join(line.strip() for line in str(refused.value).split("yourself:")[1].splitlines())
    exec(code, {"trainer": trainer, "scheduler": scheduler})
    return trainer, used


@pytest.mark.parametrize("make", [CosineLRScheduler, timm])
@pytest.mark.parametrize(("by_epoch", "length"), [(True, 2), (False, 6)])
def test_the_handlers_of_the_error_step_it(
    by_epoch: bool, length: int, make: Callable[..., Any], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """The rates are those of timm's training loop, also in a run that goes back or is resumed in the middle of an epoch."""
    trainer, used = trainer_with_handlers(make_trainer, make, by_epoch, length, tmp_path / "back")
    once(trainer, "after_train_iter", 4, lambda: trainer.rollback("iter_2"))
    trainer.train()
    resumed, rates = trainer_with_handlers(make_trainer, make, by_epoch, length, tmp_path / "resumed")
    resumed.resume(tmp_path / "back" / "iter_2")
    resumed.train()

    counts = [iteration // 3 if by_epoch else iteration for iteration in range(6)]
    expected = [0.05 * (1 + math.cos(math.pi * t / length)) for t in counts]
    assert used[-4:] == rates == pytest.approx(expected[2:])
    assert used[:-4] == pytest.approx(expected[: len(used) - 4])


def test_timms_scheduler_on_plateau_is_refused(make_trainer: MakeTrainer) -> None:
    """It has a state, so the error names the scheduler whose state a checkpoint has."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = CosineLRScheduler(optimizer, 6)
    scheduler.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)  # type: ignore[attr-defined]

    with pytest.raises(
        TypeError, match=r"step needs epoch and a metric: pass torch.*ReduceLROnPlateau\(optimizer\)"
    ):
        make_trainer(model=model, optimizer=optimizer, schedulers=[scheduler])


class CosineDecay:
    """A function of the step, as Keras' schedules are."""

    def __call__(self, step: int) -> torch.Tensor:
        return torch.tensor(0.05 * (1 + math.cos(math.pi * step / 6)))


def keras() -> Any:
    """Return Keras' own schedule."""
    return pytest.importorskip("keras").optimizers.schedules.CosineDecay(0.1, 6)


@pytest.mark.parametrize("make", [CosineDecay, pytest.param(keras, marks=pytest.mark.slow)])
def test_a_function_of_the_step_is_refused_with_the_scheduler_that_calls_it(
    make: Callable[[], Any], make_trainer: MakeTrainer
) -> None:
    """The scheduler of the error gives the function's rates."""
    model, schedule = tiny_model(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(
        TypeError, match=r"got .*CosineDecay.*, a function of the step.*lr=1\.0, and pass"
    ) as refused:
        make_trainer(model=model, optimizer=optimizer, schedulers=[schedule])
    code = str(refused.value).split("and pass ")[1]
    scheduler = eval(code, {"torch": torch, "optimizer": optimizer, "schedule": schedule})

    trainer = make_trainer(model=model, optimizer=optimizer, train_loader=batches(3), schedulers=[scheduler])
    used = rates_of(trainer)
    trainer.train()

    assert used == pytest.approx([0.05 * (1 + math.cos(math.pi * i / 6)) for i in range(6)], rel=1e-6)


@pytest.mark.slow
def test_the_schedules_of_transformers_are_resumed(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """They are PyTorch's `LambdaLR`, and are stepped by iteration; a resumed run uses the same rates."""
    transformers = pytest.importorskip("transformers")

    def make(work_dir: Path) -> Trainer:
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 2, 6)
        return make_trainer(
            model=model,
            optimizer=optimizer,
            schedulers=[schedule],
            train_loader=batches(3),
            work_dir=work_dir,
            hooks=[CheckpointHook(1, by_epoch=False)],
        )

    whole, resumed = make(tmp_path / "whole"), make(tmp_path / "resumed")
    used, others = rates_of(whole), rates_of(resumed)
    whole.train()
    resumed.resume(tmp_path / "whole" / "iter_2")
    resumed.train()

    falling = [0.05 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]
    assert used == pytest.approx([0.0, 0.05, *falling])
    assert others == used[2:]


def test_a_scheduler_with_optional_arguments_is_accepted(make_trainer: MakeTrainer) -> None:
    """PyTorch's own `step(epoch=None)` needs none."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)]

    assert make_trainer(model=model, optimizer=optimizer, schedulers=schedulers).schedulers == schedulers
