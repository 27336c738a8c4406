"""Validations on a real CUDA device; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Trainer
from tests.support.trainers import batches

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_torchmetrics_score_a_model_on_the_device(tmp_path: Path) -> None:
    """A metric of torchmetrics that was made on the CPU scores predictions on the device."""
    trainer = Trainer(
        torch.nn.Linear(4, 2),
        loss_fn=torch.nn.functional.cross_entropy,
        val_loader=batches(3),
        evaluator={"accuracy": MulticlassAccuracy(2)},
        max_epochs=1,
        work_dir=tmp_path,
        device="auto",
    )

    assert 0 <= trainer.val()["accuracy"] <= 1
    trainer.close()


def test_a_loss_with_weights_of_classes_is_moved(tmp_path: Path) -> None:
    """A loss that was made on the CPU, with weights of the classes, trains a model on the device."""
    model = torch.nn.Linear(4, 2)
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_loader=batches(3),
        loss_fn=torch.nn.CrossEntropyLoss(torch.tensor([1.0, 2.0])),
        max_epochs=1,
        work_dir=tmp_path,
        device="auto",
    )

    trainer.train()

    assert trainer.iter == 3
