"""A small loader, and the outputs that a prediction on it must have."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from eventloop import Trainer
from tests.support.trainers import (
    samples,
)

COUNT = 11


def loader_of(count: int = COUNT, **options: Any) -> DataLoader[Any]:
    """A loader of batches of 4 and a smaller last one."""
    return DataLoader(samples(count), batch_size=4, **options)


def expected_of(trainer: Trainer, count: int = COUNT) -> torch.Tensor:
    """What the model returns for all samples at once, in eval mode."""
    modes = [(module, module.training) for module in trainer.model.modules()]
    with torch.no_grad():
        outputs: torch.Tensor = trainer.model.eval()(samples(count).tensors[0])
    for module, training in modes:
        module.training = training
    return outputs
