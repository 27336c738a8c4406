"""Numbers in mappings within the outputs of a step: mmcv's are logged, others are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eventloop import Trainer
from eventloop.writers import JSONLWriter, read_jsonl
from tests.support.trainers import MakeTrainer, batches

Step = Callable[[Trainer, Any], dict[str, Any]]


def _step(**more: Any) -> Step:
    """Return a step that returns its loss, and something more."""

    def step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        return {"loss": F.cross_entropy(trainer.model(batch[0]), batch[1]), **more}

    return step


def test_log_vars_are_logged_by_their_names(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    """mmcv's form `dict(loss=..., log_vars=dict(acc=...))` is logged as mmcv logs it."""
    step = _step(log_vars={"acc": 0.5, "top5": torch.tensor(0.75)}, num_samples=4)

    make_trainer(train_step=step, writers=[JSONLWriter()], work_dir=tmp_path).train()

    (path,) = tmp_path.glob("*.jsonl")
    rows = [row for row in read_jsonl(path) if "loss" in row]
    assert rows
    assert [(row["acc"], row["top5"]) for row in rows] == [(0.5, 0.75)] * len(rows)


def test_the_loss_of_the_outputs_counts(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    """mmcv's log_vars repeat the loss; it is one value, that of the outputs."""
    trainer = make_trainer(train_step=_step(log_vars={"loss": 99.0, "acc": 0.5}))

    trainer.train()

    assert trainer.metrics.latest()["loss"].value < 99
    assert "two sources" not in caplog.text


def test_log_vars_of_a_validation_are_metrics(make_trainer: MakeTrainer) -> None:
    """They are averaged as other numbers of `val_step` are."""
    trainer = make_trainer(
        val_loader=batches(2), val_step=lambda trainer, batch: {"loss": 1.0, "log_vars": {"acc": 0.5}}
    )

    assert trainer.val() == {"acc": 0.5, "loss": 1.0}


def test_other_mappings_of_numbers_are_named_once(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning of the train step and one of the validation say where the numbers belong."""
    nested = {"metrics": {"acc": 0.5}, "features": {"x": torch.ones(3)}}
    trainer = make_trainer(train_step=_step(**nested), val_loader=batches(2), val_step=_step(**nested))

    trainer.train()

    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in lines if "mapping" in line] == [
        "the train step returned 'metrics' as mappings of numbers, which are not logged",
        "val_step returned 'metrics' as a mapping of numbers, which become no metrics",
    ]
