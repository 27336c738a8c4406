"""A loss that is NaN or infinite is said once until losses are finite again, and good checkpoints stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eventloop import Trainer
from eventloop.events import InvalidLoss
from eventloop.hooks import CheckpointHook
from eventloop.writers import JSONLWriter
from tests.support.trainers import MakeTrainer, batches


def _lost_from(first: int, value: float = math.nan) -> Callable[[Trainer, Any], torch.Tensor]:
    """A train step whose loss and gradients are `value` from an iteration on."""

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(trainer.model(batch[0]), batch[1])
        return loss * value if trainer.iter >= first else loss

    return step


@pytest.mark.parametrize("writers", [[], [JSONLWriter()]], ids=["no writer", "logged"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_it_is_said_once(
    value: float, writers: list[Any], make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning and one event name the first such iteration; the training goes on to its end."""
    trainer = make_trainer(train_step=_lost_from(2, value), train_loader=batches(6), writers=writers)
    found: list[InvalidLoss] = []
    trainer.bus.subscribe(lambda trainer, event: found.append(event), "invalid_loss")

    trainer.train()

    assert trainer.iter == 12
    assert [(event.iter, event.epoch) for event in found] == [(2, 0)]
    assert f"the loss is {value} in iteration 2 (epoch 0)" in found[0].advice
    assert [r.getMessage() for r in caplog.records if "the loss is" in r.getMessage()] == [found[0].advice]


def test_it_is_said_where_nothing_is_subscribed(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """Without writers and handlers the warning comes at the end of the run."""
    make_trainer(train_step=_lost_from(2), writers=[]).train()

    assert len([r for r in caplog.records if "the loss is nan in iteration 2" in r.getMessage()]) == 1


def test_a_finite_loss_is_not_mentioned(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    """A run whose losses are numbers has no such line; NaN under another name is the user's."""

    def step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        return {"loss": F.cross_entropy(trainer.model(batch[0]), batch[1]), "ratio": math.nan}

    trainer = make_trainer(train_step=step)
    with trainer.bus.capture("invalid_loss") as seen:
        trainer.train()

    assert seen == []
    assert [r for r in caplog.records if "the loss is" in r.getMessage()] == []


def _checkpoints(directory: Path) -> set[str]:
    return {path.parent.name for path in directory.glob("*/manifest.json")}


def _finite(path: Path) -> bool:
    state = torch.load(path / "state.pth", weights_only=True)
    return all(bool(value.isfinite().all()) for value in state["state_dict"].values())


@pytest.mark.parametrize("interval", [1, 20], ids=["logged", "found when it is saved"])
def test_checkpoints_from_before_are_kept(interval: int, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    """max_keep_ckpts counts only those saved after the loss was lost: the good ones stay."""
    trainer = make_trainer(
        train_step=_lost_from(4),
        train_loader=batches(10),
        max_epochs=1,
        work_dir=tmp_path,
        hooks=[CheckpointHook(interval=1, by_epoch=False, max_keep_ckpts=2)],
        default_hooks={"logger": {"interval": interval}},
    )

    trainer.train()

    assert _checkpoints(tmp_path) == {"iter_3", "iter_4", "iter_9", "iter_10"}
    assert {name for name in _checkpoints(tmp_path) if _finite(tmp_path / name)} == {"iter_3", "iter_4"}


def test_the_best_from_before_is_kept(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    """A score that lost weights reach by chance replaces no checkpoint from before."""
    scores = iter([0.5, 0.9, 0.95])
    trainer = make_trainer(
        train_step=_lost_from(4),
        max_epochs=3,
        val_loader=batches(1),
        val_step=lambda trainer, batch: {"acc": next(scores)},
        sanity_val=0,
        work_dir=tmp_path,
        hooks=[CheckpointHook(save_best="acc", save_last=False)],
    )

    trainer.train()

    assert _checkpoints(tmp_path) == {"best_acc_epoch_1", "best_acc_epoch_3"}
    assert _finite(tmp_path / "best_acc_epoch_1")


def test_a_resumed_run_leaves_them(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    """The checkpoints from before do not count after a resume either."""
    options: dict[str, Any] = {
        "train_step": _lost_from(2),
        "train_loader": batches(4),
        "work_dir": tmp_path,
    }
    hook = {"type": "CheckpointHook", "interval": 1, "by_epoch": False, "max_keep_ckpts": 1}
    make_trainer(hooks=[hook], max_epochs=1, **options).train()
    second = make_trainer(hooks=[hook], max_epochs=2, **options)
    second.resume("auto")

    second.train()

    assert "iter_2" in _checkpoints(tmp_path)
    assert _finite(tmp_path / "iter_2")


def _inf_once_then_lost(trainer: Trainer, batch: Any) -> torch.Tensor:
    """Give a loss of inf in iteration 2, whose gradients are finite, and lost weights from iteration 18 on."""
    loss = F.cross_entropy(trainer.model(batch[0]), batch[1])
    return loss + math.inf if trainer.iter == 2 else loss * math.nan if trainer.iter >= 18 else loss


def test_a_loss_that_is_lost_again_is_another_one(
    tmp_path: Path, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """After finite losses the next NaN is said too, and the newest good checkpoints stay."""
    trainer = make_trainer(
        train_step=_inf_once_then_lost,
        max_epochs=10,
        work_dir=tmp_path,
        hooks=[CheckpointHook(interval=1, max_keep_ckpts=2)],
    )
    found: list[int] = []
    trainer.bus.subscribe(lambda trainer, event: found.append(event.iter), "invalid_loss")

    trainer.train()

    assert found == [2, 18]
    said = [r.getMessage() for r in caplog.records if "the loss is" in r.getMessage()]
    assert ["inf in iteration 2 " in said[0], "nan in iteration 18 " in said[1]] == [True] * len(said)
    assert {name for name in _checkpoints(tmp_path) if _finite(tmp_path / name)} == {"epoch_5", "epoch_6"}


def test_a_loss_that_is_lost_again_and_again_does_not_fill_the_disk(
    tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    """The checkpoints from before the first and the last such loss stay, not those of each."""

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(trainer.model(batch[0]), batch[1])
        return loss + math.inf if trainer.iter % 3 == 2 and trainer.iter > 6 else loss

    trainer = make_trainer(
        train_step=step,
        max_epochs=12,
        work_dir=tmp_path,
        hooks=[CheckpointHook(interval=1, max_keep_ckpts=1)],
    )

    trainer.train()

    kept = _checkpoints(tmp_path)
    assert {"epoch_2", "epoch_11", "epoch_12"} <= kept
    assert len(kept) <= 4


@pytest.mark.parametrize("load", ["resume", "load_checkpoint"])
def test_it_is_said_again_after_a_load(
    load: str, tmp_path: Path, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """A second attempt of one trainer, from good weights, is watched as the first one was."""
    first = [6]
    trainer = make_trainer(
        train_step=lambda trainer, batch: _lost_from(first[0])(trainer, batch),
        max_epochs=8,
        work_dir=tmp_path,
        hooks=[CheckpointHook(interval=1, max_keep_ckpts=2)],
    )
    trainer.bus.subscribe(
        lambda trainer, event: trainer.stop("look"), "after_train_epoch", start=3, once=True
    )
    trainer.train()
    trainer.optimizer.state.clear()  # its momentum is NaN
    first[0] = 18
    getattr(trainer, load)(str(tmp_path / "epoch_2"))

    with trainer.bus.capture("invalid_loss") as seen:
        trainer.train()

    assert [event.iter for event in seen if isinstance(event, InvalidLoss)] == [18]
    assert sum("the loss is nan" in record.getMessage() for record in caplog.records) == 2
    assert {"epoch_5", "epoch_6"} <= {n for n in _checkpoints(tmp_path) if _finite(tmp_path / n)}
