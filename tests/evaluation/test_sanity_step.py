"""The sanity validation: a user's step can know it, and a step that cannot validate is known before the training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from tests.support.trainers import MakeTrainer, batches


def test_val_step_can_know_it(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    """A step that counts its calls counts the three of the validation, and the log has a line about the fourth."""
    caplog.set_level(logging.INFO, logger="eventloop")
    calls: list[bool] = []

    def val_step(trainer: Trainer, batch: Any) -> dict[str, float]:
        calls.append(trainer.sanity_checking)
        return {"acc": 1.0}

    trainer = make_trainer(
        val_loader=batches(3), val_step=val_step, max_epochs=1, hooks=[CheckpointHook(save_best="acc")]
    )

    trainer.train()

    assert calls == [True, False, False, False]
    lines = [record.getMessage() for record in caplog.records if "sanity" in record.getMessage()]
    assert len(lines) == 1
    assert "sanity validation of 1 batch comes before training" in lines[0]


def test_it_ends_with_an_error(make_trainer: MakeTrainer) -> None:
    """After a step that raises in it the trainer is in no sanity validation any more."""

    def val_step(trainer: Trainer, batch: Any) -> dict[str, float]:
        raise ZeroDivisionError

    trainer = make_trainer(val_loader=batches(1), val_step=val_step, sanity_val=1)

    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not trainer.sanity_checking


def _dicts(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"image": inputs, "label": target} for inputs, target in batches(count)]


def _step(trainer: Trainer, batch: Any) -> torch.Tensor:
    return F.cross_entropy(trainer.model(batch["image"]), batch["label"])


def _train(trainer: Trainer) -> None:
    trainer.train()


def _by_hand(trainer: Trainer) -> None:
    for _ in trainer.epochs():
        for batch in trainer.batches(_dicts(2)):
            trainer.outputs = {"loss": _step(trainer, batch)}


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (_train, {"train_step": _step, "train_loader": _dicts(2)}),
        (_by_hand, {"loss_fn": None, "train_loader": None}),
    ],
    ids=["train_step", "a loop of one's own"],
)
def test_batches_that_need_a_val_step_are_known_before_the_training(
    run: Callable[[Trainer], None], options: dict[str, Any], make_trainer: MakeTrainer
) -> None:
    """One batch of the val_loader shows that it is no pair, before the first iteration."""
    trainer = make_trainer(val_loader=_dicts(2), **options)

    with pytest.raises(
        TypeError, match=r"val_loader must give batches .* got a dict: pass val_step"
    ) as raised:
        run(trainer)

    assert trainer.iter == 0
    assert any("raised before the training" in note for note in raised.value.__notes__)


def test_a_trial_batch_changes_nothing(make_trainer: MakeTrainer) -> None:
    """The training has the same bits with and without it, and no handler hears of it."""

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        return F.cross_entropy(trainer.model(batch[0]), batch[1])

    trained = []
    for sanity_val in (None, 0):
        trainer = make_trainer(train_step=step, val_loader=batches(2), sanity_val=sanity_val, max_epochs=1)
        with trainer.bus.capture("before_val_iter") as seen:
            trainer.train()
        assert len(seen) == 2
        trained.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))

    assert torch.equal(*trained)


def _by_workflow(trainer: Trainer) -> None:
    trainer.run([("train", 1)])


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (_train, {"val_begin": 100}),
        (_train, {"max_epochs": None, "max_iters": 4, "val_begin": 5}),
        (_by_workflow, {}),
    ],
    ids=["val_begin in epochs", "val_begin in iterations", "a workflow of training"],
)
def test_no_batch_is_tried_where_nothing_is_validated(
    run: Callable[[Trainer], None], options: dict[str, Any], make_trainer: MakeTrainer
) -> None:
    """A val_loader that the run will not use may have batches of any form."""
    trainer = make_trainer(
        val_loader=_dicts(2), train_step=_step, train_loader=_dicts(2), **{"max_epochs": 2, **options}
    )

    run(trainer)

    assert trainer.iter == 4


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (_train, {"max_epochs": 2, "val_begin": 2, "val_interval": 5}),
        (lambda trainer: trainer.run([("train", 5), ("val", 1)]), {"max_epochs": 2}),
    ],
    ids=["val_begin at the end", "a workflow longer than the run"],
)
def test_a_batch_is_tried_if_only_the_end_is_validated(
    run: Callable[[Trainer], None], options: dict[str, Any], make_trainer: MakeTrainer
) -> None:
    """The single validation of the run would fail, so its first batch is tried before the training."""
    trainer = make_trainer(val_loader=_dicts(2), train_step=_step, train_loader=_dicts(2), **options)

    with pytest.raises(TypeError, match=r"val_loader must give batches .* got a dict"):
        run(trainer)

    assert trainer.iter == 0
