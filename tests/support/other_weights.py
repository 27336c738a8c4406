"""Weights of the tiny model as other programs have them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from eventloop import Trainer
from tests.support.trainers import tiny_model

State = dict[str, torch.Tensor]


def weights() -> State:
    """Other ones than a new model has."""
    return {name: torch.full_like(value, 0.5) for name, value in tiny_model().state_dict().items()}


def has(trainer: Trainer, state: Mapping[str, torch.Tensor]) -> bool:
    """The model's are these, all of them."""
    own = trainer.model.state_dict()
    return own.keys() == state.keys() and all(torch.equal(own[name], state[name]) for name in own)


def put(path: Path, state: object) -> Path:
    """Save something as other programs do."""
    torch.save(state, path)
    return path
