"""Test resumes of hand-written loops, which name their loader only when a pass begins."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError
from eventloop.hooks import CheckpointHook
from tests.support.interrupted import stop_after
from tests.support.trainers import MakeTrainer, record, samples
from tests.training.test_hand_written import train_by_hand


def stopped(make_trainer: MakeTrainer, directory: Path, after: int) -> None:
    """Train by hand for so many iterations; an epoch has five."""
    trainer = make_trainer(train_loader=None, work_dir=directory, hooks=[CheckpointHook()])
    stop_after(trainer, after)
    train_by_hand(trainer, DataLoader(samples(20), 4, shuffle=True))


def resumed(make_trainer: MakeTrainer, directory: Path, **options: Any) -> Trainer:
    """Return a new trainer that is resumed."""
    trainer = make_trainer(train_loader=None, work_dir=directory, hooks=[CheckpointHook()])
    trainer.resume("auto", **options)
    return trainer


@pytest.mark.parametrize(
    ("loader", "lines"),
    [
        (
            DataLoader(samples(20), 5, shuffle=True),
            ["batch_size: 4 in the checkpoint, 5", "loader_length: 5 in the checkpoint, 4"],
        ),
        (DataLoader(samples(18), 4, shuffle=True), ["dataset_length: 20 in the checkpoint, 18"]),
        (DataLoader(samples(20), 4), ["sampler: 'RandomSampler' in the checkpoint, 'SequentialSampler'"]),
    ],
    ids=["batch size", "data set", "order"],
)
def test_another_loader_within_a_pass_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path, loader: DataLoader[Any], lines: list[str]
) -> None:
    """Another loader within a pass is refused with every difference and advice, and nothing is trained or
    saved."""
    stopped(make_trainer, tmp_path, 3)
    trainer = resumed(make_trainer, tmp_path)
    rows = record(trainer, "before_train_iter", "checkpoint_saved")

    with pytest.raises(CheckpointError, match="is of a pass over another loader than this loop's") as error:
        train_by_hand(trainer, loader)

    told = str(error.value).splitlines()
    assert told[1:-1] == [f"  {line} in this trainer" for line in lines]
    assert told[-1].startswith('resume(path, changed="apply") continues with this one')
    assert rows == []
    assert error.value.__notes__[0].startswith("the newest checkpoint to resume from is")


@pytest.mark.parametrize(
    ("after", "changed", "loader", "iters", "line"),
    [
        (3, "apply", DataLoader(samples(20), 2), 3 + 4 + 10, "loader_length: 5 in the checkpoint, 10"),
        (3, "keep", DataLoader(samples(20), 2), 3 + 4 + 10, "loader_length: 5 in the checkpoint, 10"),
        (5, "refuse", DataLoader(samples(20), 10), 5 + 2, "batch_size: 4 in the checkpoint, 10"),
        (3, "refuse", DataLoader(samples(20), 4, shuffle=True), 10, ""),
    ],
    ids=["apply", "keep", "the next pass", "the same"],
)
def test_another_loader_goes_on(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    after: int,
    changed: str,
    loader: DataLoader[Any],
    iters: int,
    line: str,
) -> None:
    """With `changed`, or between two passes, another loader is used from the same part of the pass, and
    differences are logged."""
    stopped(make_trainer, tmp_path, after)
    trainer = resumed(make_trainer, tmp_path, changed=changed)

    with caplog.at_level(logging.WARNING):
        train_by_hand(trainer, loader)

    assert (trainer.iter, trainer.epoch) == (iters, 2)
    assert (f"{line} in this trainer; the loop continues with its own" in caplog.text) == bool(line)
    assert ("in the checkpoint" in caplog.text) == bool(line)
