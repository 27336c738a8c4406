"""Test that `changed` may answer for each setting, and what follows from the answer for the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError
from eventloop.hooks import CheckpointHook, EMAHook
from tests.support.interrupted import stop_after
from tests.support.trainers import MakeTrainer, record, samples, tiny_model
from tests.training.test_hand_written import train_by_hand

COUNT = 20


def build(
    make_trainer: MakeTrainer,
    lr: float = 0.1,
    momentum: float = 0.9,
    ranks: int = 1,
    step: int = 50,
    size: int = 4,
    count: int = COUNT,
    **changes: Any,
) -> Trainer:
    """Return a trainer with some settings, which counts as one of so many ranks."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    trainer = make_trainer(
        model=model,
        optimizer=optimizer,
        schedulers=[StepLR(optimizer, step)],
        **{"hooks": [CheckpointHook()], "train_loader": DataLoader(samples(count), size), **changes},
    )
    trainer.world_size = trainer.data_ranks = ranks
    return trainer


@pytest.fixture
def path(make_trainer: MakeTrainer) -> Path:
    """Return a checkpoint of one rank, after 3 of 5 batches."""
    trainer = build(make_trainer)
    stop_after(trainer, 3)
    trainer.train()
    return trainer.checkpoint_dir / "iter_3"


@pytest.mark.parametrize(("answer", "rate"), [("apply", 0.4), ("keep", 0.1)])
def test_one_setting(make_trainer: MakeTrainer, path: Path, answer: Any, rate: float) -> None:
    """A setting with an answer of its own has the value that this chooses."""
    trainer = build(make_trainer, lr=0.4)

    trainer.resume(path, changed={"lr": answer})

    assert trainer.optimizer.param_groups[0]["lr"] == rate


@pytest.mark.parametrize("changed", [{"lr": "apply"}, {"lr": "apply", "momentum": "refuse"}, {}])
def test_what_has_no_answer_is_refused(make_trainer: MakeTrainer, path: Path, changed: Any) -> None:
    """A changed setting without an answer, or with "refuse", is refused by name, and nothing is loaded."""
    trainer = build(make_trainer, lr=0.4, momentum=0.5)

    with pytest.raises(CheckpointError, match=r"momentum: 0\.9 in the checkpoint, 0\.5") as error:
        trainer.resume(path, changed=changed)

    assert ("lr: 0.1 in the checkpoint" in str(error.value)) == (not changed)
    assert trainer.iter == 0


def test_answers_that_cannot_be_given_together(make_trainer: MakeTrainer, path: Path) -> None:
    """Settings of optimizers and schedulers have one answer, because schedules are computed from all of them."""
    trainer = build(make_trainer, lr=0.4, step=60)

    with pytest.raises(ValueError, match=r"one answer .*'lr': 'apply', 'StepLR\.step_size': 'keep'"):
        trainer.resume(path, changed={"lr": "apply", "StepLR.step_size": "keep"})

    assert trainer.iter == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"worldsize": "apply"}, "unknown setting 'worldsize': did you mean 'world_size'"),
        ({"StepLR.step": "apply"}, r"unknown setting 'StepLR\.step': did you mean 'StepLR\.step_size'"),
        ({"world_size": "aply"}, r'changed\[.world_size.\] must be "refuse", "keep" or "apply", got .aply.'),
        ({"lr": True}, r'changed\[.lr.\] must be "refuse", "keep" or "apply", got True'),
    ],
)
def test_wrong_answers(make_trainer: MakeTrainer, path: Path, changed: Any, message: str) -> None:
    """An unknown setting or answer is refused with a suggestion, also if nothing differs."""
    with pytest.raises(ValueError, match=message):
        build(make_trainer).resume(path, changed=changed)


@pytest.mark.parametrize(
    "name",
    [
        "lr",
        "StepLR.gamma",
        "world_size",
        "data_ranks",
        "batch_size",
        "position",
        "frozen parameters",
        "types of buffers",
        "parameters of the optimizer",
        "EMAHook.begin_iter",
    ],
)
def test_each_setting_may_have_an_answer(make_trainer: MakeTrainer, path: Path, name: str) -> None:
    """A script may answer for a setting that has not changed, and for one that the checkpoint does not have."""
    trainer = build(make_trainer, hooks=[EMAHook()])

    trainer.resume(path, changed={name: "apply"})

    assert trainer.iter == 3


@pytest.mark.parametrize(
    ("now", "refused"),
    [
        ({"ranks": 2, "count": COUNT // 2}, None),  # each rank has half of the data set
        ({"ranks": 2, "count": COUNT // 2 - 1}, "dataset_length: 20 in the checkpoint, 9"),
        ({"count": COUNT // 2}, "dataset_length: 20 in the checkpoint, 10"),
        ({"ranks": 2, "size": 2}, "batch_size: 4 in the checkpoint, 2"),
        ({"ranks": 2, "lr": 0.4}, r"lr: 0\.1 in the checkpoint, 0\.4"),
        ({"ranks": 1}, None),
    ],
)
def test_what_follows_from_the_ranks(
    make_trainer: MakeTrainer, path: Path, now: dict[str, Any], refused: str | None
) -> None:
    """The answer for `world_size` is that for what changes with it, and for nothing else."""
    trainer = build(make_trainer, **now)

    if refused is None:
        trainer.resume(path, changed={"world_size": "apply"})
        return
    with pytest.raises(CheckpointError, match=refused) as error:
        trainer.resume(path, changed={"world_size": "apply"})
    assert "world_size:" not in str(error.value)


def test_a_batch_size_alone(make_trainer: MakeTrainer, path: Path) -> None:
    """The answer for the batch size is that for the number of batches, which follows from it."""
    trainer = build(make_trainer, size=2)

    trainer.resume(path, changed={"batch_size": "apply"})

    assert trainer.batch_idx == 6


@pytest.mark.parametrize(("answer", "trained"), [("apply", 10 + 2), ("refuse", 0)])
def test_a_hand_written_loop(make_trainer: MakeTrainer, path: Path, answer: Any, trained: int) -> None:
    """The answers hold for the loader that a loop shows only when its pass begins."""
    trainer = build(make_trainer, train_loader=None)
    trainer.resume(path, changed={"batch_size": answer})
    rows = record(trainer, "before_train_iter")

    def train() -> None:
        train_by_hand(trainer, DataLoader(samples(COUNT), 3))

    if answer == "refuse":
        with pytest.raises(CheckpointError, match="batch_size: 4 in the checkpoint, 3 in this trainer"):
            train()
    else:
        train()
    assert len(rows) == (3 + 7 if trained else 0)
