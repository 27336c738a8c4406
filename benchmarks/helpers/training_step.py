"""The training step that every job of a benchmark has."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Steps:
    """A classifier and its optimizer, which a job makes, and what a batch of (inputs (N, F), classes (N,)) does with them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def loss(self, batch: Any) -> torch.Tensor:
        """The forward pass; the loss is 0-dim."""
        inputs, target = batch
        return F.cross_entropy(self.model(inputs), target)

    def step(self, batch: Any) -> torch.Tensor:
        """Forward, backward and step; the loss without its graph."""
        loss = self.loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()
