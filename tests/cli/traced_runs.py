"""A training that has recorded a trace."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from eventloop import Trainer
from eventloop.hooks import CheckpointHook, TraceHook
from eventloop.writers import CSVWriter, JSONLWriter
from tests.support.trainers import batches, tiny_model


def traced(directory: Path, *windows: tuple[int, int]) -> Trainer:
    """One to be run, with writers, evaluations and checkpoints.

    Args:
        windows: first iteration and number of iterations of each.
    """
    model = tiny_model()
    return Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        train_loader=batches(5),
        val_loader=batches(2),
        max_epochs=6,
        work_dir=directory,
        writers=[JSONLWriter(), CSVWriter()],
        hooks=[CheckpointHook(1, by_epoch=False, when_busy="wait"), TraceHook(windows=[*windows])],
    )
