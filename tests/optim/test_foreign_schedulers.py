"""Schedulers that are not stepped as PyTorch's are refused when the trainer is built, with the handlers to write."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from eventloop import Trainer
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

    assert "def step_by_epoch(trainer, event): scheduler.step(event.epoch + 1)" in str(refused.value)
    assert "def step_by_iter(trainer, event): scheduler.step_update(event.iter + 1)" in str(refused.value)


@pytest.mark.parametrize(("by_epoch", "length"), [(True, 2), (False, 6)])
def test_the_handlers_of_the_error_step_it(by_epoch: bool, length: int, make_trainer: MakeTrainer) -> None:
    """They are code that runs, and the rates are those of timm's training loop."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = CosineLRScheduler(optimizer, length, t_in_epochs=by_epoch)
    with pytest.raises(TypeError) as refused:
        make_trainer(model=model, optimizer=optimizer, schedulers=[scheduler])
    trainer = make_trainer(model=model, optimizer=optimizer, train_loader=batches(3))
    used: list[float] = []

    def record_rate(trainer: Trainer, event: Any) -> None:
        used.append(optimizer.param_groups[0]["lr"])

    trainer.bus.subscribe(record_rate, "before_train_iter")
    code = "\n".join(line.strip() for line in str(refused.value).split("yourself:")[1].splitlines())
    exec(code, {"trainer": trainer, "scheduler": scheduler})
    trainer.train()

    counts = [iteration // 3 if by_epoch else iteration for iteration in range(6)]
    assert used == pytest.approx([0.05 * (1 + math.cos(math.pi * t / length)) for t in counts])


def test_a_scheduler_with_optional_arguments_is_accepted(make_trainer: MakeTrainer) -> None:
    """PyTorch's own `step(epoch=None)` needs none."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)]

    assert make_trainer(model=model, optimizer=optimizer, schedulers=schedulers).schedulers == schedulers
