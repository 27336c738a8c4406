"""Test which validations count for the best checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.checkpoint import load_checkpoint, read_manifest
from eventloop.hooks import CheckpointHook

Make = Callable[..., Trainer]
Scripted = Callable[..., dict[str, Any]]
Files = Callable[..., list[str]]


@pytest.fixture
def run(make_trainer: Make, scripted: Scripted) -> Callable[..., Trainer]:
    """Return a function that builds a trainer with the given scores, which saves the best and the last
    checkpoint."""

    def make(*scores: float, max_epochs: int = 2, **options: Any) -> Trainer:
        hook = CheckpointHook(save_best="acc")
        return make_trainer(**{"max_epochs": max_epochs, "hooks": [hook], **scripted(*scores), **options})

    return make


Run = Callable[..., Trainer]


def bests(trainer: Trainer) -> list[str]:
    """Return the names of the best checkpoints on the disk."""
    return sorted(path.name for path in trainer.work_dir.glob("best_*"))


def validating(trainer: Trainer, event: str, priority: int) -> Trainer:
    """Return the trainer, which validates once more in the first such event."""
    trainer.bus.subscribe(lambda trainer, event: trainer.val(), event, priority=priority, once=True)
    return trainer


def test_one_after_the_training_leaves_the_best_alone(
    run: Run, files: Files, make_trainer: Make, tmp_path: Path
) -> None:
    """A validation after the training, for example of other weights, saves and removes nothing."""
    other = make_trainer(work_dir=tmp_path / "other", hooks=[CheckpointHook()])
    other.train()
    trainer = run(0.5, 0.375, 0.875)
    trainer.train()
    before = files()

    trainer.load_checkpoint(other.work_dir / "epoch_1")
    assert trainer.val() == {"acc": 0.875}

    assert files() == before
    assert trainer.resume("best").name == "best_acc_epoch_1"


def test_one_before_the_training_saves_nothing(run: Run, files: Files) -> None:
    """A validation between a resume and the training saves nothing, and its score does not count."""
    run(0.5, 0.375).train()
    before = files()
    resumed = run(0.875, 0.625, 0.5625, max_epochs=4)
    resumed.resume("auto")

    assert resumed.val() == {"acc": 0.875}
    assert files() == before
    resumed.train()
    assert bests(resumed) == ["best_acc_epoch_3"]
    assert read_manifest(resumed.work_dir / "best_acc_epoch_3").metrics == {"acc": 0.625}


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("event", "priority", "name"),
    [
        ("before_train", 0, "best_acc_epoch_0"),
        ("after_train", 0, "best_acc_epoch_1"),
        ("before_train", 100, "best_acc_epoch_0"),
        ("before_train_iter", 50, "best_acc_epoch_0"),
    ],
)
def test_one_that_a_handler_asks_for_counts(run: Run, event: str, priority: int, name: str) -> None:
    """Validations of handlers within a training count, with the weights they validated."""
    trainer = run(0.875, val_begin=2, max_epochs=1)
    weights = list[torch.Tensor]()
    trainer.bus.subscribe(
        lambda trainer, event: weights.append(trainer.model.state_dict()["weight"].clone()), "before_val"
    )
    validating(trainer, event, priority).train()

    assert bests(trainer) == [name]
    best = trainer.work_dir / name
    assert read_manifest(best).metrics == {"acc": 0.875}
    assert torch.equal(load_checkpoint(best)["state_dict"]["weight"], weights[0])


@pytest.mark.parametrize(("event", "priority"), [("before_run", 95), ("after_run", 100)])
def test_one_around_the_training_does_not(run: Run, event: str, priority: int) -> None:
    """Validations of handlers before and after the training do not count, also not in the next training."""
    trainer = validating(run(0.875, 0.75, val_begin=9, max_epochs=1), event, priority)
    trainer.train()
    trainer.max_epochs = 2
    trainer.train()

    assert bests(trainer) == []


def test_a_workflow_and_a_loop_of_ones_own_are_trainings(run: Run, make_batches: Any, tmp_path: Path) -> None:
    """Validations within workflows and hand-written loops count."""
    workflow = run(0.5, 0.75, work_dir=tmp_path / "workflow")
    workflow.run([("train", 1), ("val", 1)])
    assert bests(workflow) == ["best_acc_epoch_2"]

    own = run(0.75, val_begin=9, work_dir=tmp_path / "own")
    for epoch in own.epochs():
        for inputs, target in own.batches(make_batches(4)):
            own.outputs = {"loss": torch.nn.functional.mse_loss(own.model(inputs), target)}
        if epoch == 0:
            own.val()
    assert bests(own) == ["best_acc_epoch_1"]
