"""Test the best checkpoint of a validation that a handler starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Priority, Trainer
from eventloop.checkpoint.commit import PAYLOAD
from eventloop.events import AfterTrainEpoch, AfterTrainIter, BeforeTrainIter, Event
from eventloop.hooks import CheckpointHook

Make = Callable[..., Trainer]

EPOCHS: dict[str, Any] = {"max_epochs": 2, "val_begin": 3, "batches": 6}
ITERATIONS: dict[str, Any] = {"max_iters": 12, "val_interval": 1000, "batches": 6}


def earlier_is_more(trainer: Trainer, batch: Any) -> dict[str, Any]:
    """Validate with a score that falls from validation to validation."""
    return {"loss": 100.0 - trainer.iter}


@pytest.fixture
def make_run(make_trainer: Make, make_batches: Callable[[int], Any]) -> Make:
    """Return a function that builds trainers of 12 iterations with a schedule, which save only the greatest
    loss."""

    def make(**options: Any) -> Trainer:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
        return make_trainer(
            model=model,
            optimizer=optimizer,
            val_loader=make_batches(2),
            val_step=earlier_is_more,
            schedulers=[torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.75)],
            hooks=[CheckpointHook(save_best="loss", rule="greater", save_last=False)],
            **options,
        )

    return make


def validating(trainer: Trainer, event_type: type[Event], at: int, priority: int) -> Trainer:
    """Return the trainer, which validates once more in the given event."""

    def validate(trainer: Trainer, event: Any) -> None:
        if trainer.iter == at:
            trainer.val()

    trainer.bus.subscribe(validate, event_type, priority=priority)
    return trainer


MOMENTS = [
    (AfterTrainIter, 7, Priority.LOWEST, 8, "1", "8"),
    (AfterTrainIter, 7, 60, 8, "1", "8"),
    (AfterTrainIter, 5, 60, 6, "0", "6"),
    (AfterTrainIter, 7, 10, 7, "1", "7"),
    (BeforeTrainIter, 7, 60, 7, "1", "7"),
]
"""When a validation is asked for, and the iterations and epochs whose steps are made by then."""


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("unit", "event_type", "at", "priority", "done", "epoch", "iteration"),
    [
        (EPOCHS, AfterTrainEpoch, 6, 60, 6, "1", ""),
        *((unit, *moment) for moment in MOMENTS for unit in (ITERATIONS, EPOCHS)),
    ],
)
def test_it_is_of_the_iterations_whose_steps_are_made(
    make_run: Make,
    unit: dict[str, Any],
    event_type: type[Event],
    at: int,
    priority: int,
    done: int,
    epoch: str,
    iteration: str,
    tmp_path: Path,
) -> None:
    """The best checkpoint has the counters, name and schedulers of the validated weights, and a run resumed
    from it ends with the weights of the first run."""
    trainer = validating(make_run(**unit, work_dir=tmp_path / "first"), event_type, at, priority)
    trainer.train()

    (best,) = (tmp_path / "first").glob("best_*")
    assert best.name == (f"best_loss_epoch_{epoch}" if unit is EPOCHS else f"best_loss_iter_{iteration}")
    assert torch.load(best / PAYLOAD, weights_only=True)["meta"]["iter"] == done
    resumed = make_run(**unit, work_dir=tmp_path / "second")
    resumed.resume(best)
    resumed.train()
    assert resumed.iter == trainer.iter == 12
    assert str(resumed.model.state_dict()) == str(trainer.model.state_dict())
    assert resumed.schedulers[0].last_epoch == 12


def test_its_metrics_are_logged_at_the_step_of_its_weights(
    make_run: Make, record_scalars: Callable[[Trainer], list[Any]]
) -> None:
    """A validation is logged at the number of iterations whose optimizer's steps are made."""
    trainer = make_run(**{**ITERATIONS, "val_interval": 8})
    validating(trainer, AfterTrainIter, 7, 60)
    seen = record_scalars(trainer)
    trainer.train()

    assert [event.step for event in seen if event.mode == "val"] == [8, 8, 12]
