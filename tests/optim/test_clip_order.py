"""The norm of clipping has the bits of the line that everybody writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.trainers import MakeTrainer, batches


def _model() -> nn.Sequential:
    torch.default_generator.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 33), nn.Tanh(), nn.Linear(33, 3))


def _optimizer(model: nn.Module) -> torch.optim.SGD:
    """Biases in the first group, weights in the second, as in many recipes; not in the order of the model."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": biases, "weight_decay": 0.0}, {"params": weights[::-1]}]
    return torch.optim.SGD(groups, lr=0.5, weight_decay=0.01)


def test_two_groups_are_clipped_as_the_model(make_trainer: MakeTrainer) -> None:
    """Weights and norms are those of `clip_grad_norm_(model.parameters(), 0.1)`, bit by bit."""
    hand = _model()
    optimizer, norms = _optimizer(hand), []
    for inputs, target in batches(20):
        optimizer.zero_grad()
        F.cross_entropy(hand(inputs), target).backward()
        norms.append(nn.utils.clip_grad_norm_(hand.parameters(), 0.1).item())
        optimizer.step()
    model = _model()
    trainer = make_trainer(
        model=model,
        optimizer=_optimizer(model),
        train_loader=batches(20),
        max_epochs=1,
        default_hooks={"optimizer": {"grad_clip": {"max_norm": 0.1}}},
    )

    trainer.train()

    assert [value for value, _ in trainer.metrics.history("grad_norm").values()] == norms
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), hand.parameters(), strict=True))


def test_parameters_outside_of_the_optimizer_are_not_in_the_norm(make_trainer: MakeTrainer) -> None:
    """Only what the optimizer steps is clipped, as `grad_clip` says."""
    model = _model()
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.0)
    trainer = make_trainer(
        model=model,
        optimizer=optimizer,
        train_loader=batches(1),
        max_epochs=1,
        default_hooks={"optimizer": {"grad_clip": {"max_norm": 1e9}}},
    )
    inputs, target = batches(1)[0]
    F.cross_entropy(model(inputs), target).backward()
    head = torch.cat([p.grad.flatten() for p in model[4].parameters() if p.grad is not None]).norm()

    trainer.train()

    assert trainer.metrics.latest()["grad_norm"].value == pytest.approx(head.item())
