"""Make files with weights as other programs save them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from eventloop import Trainer
from tests.support.trainers import tiny_model

State = dict[str, torch.Tensor]


def weights() -> State:
    """Return weights that differ from those of a new tiny model."""
    return {name: torch.full_like(value, 0.5) for name, value in tiny_model().state_dict().items()}


def has(trainer: Trainer, state: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a trainer's model has exactly these weights."""
    own = trainer.model.state_dict()
    return own.keys() == state.keys() and all(torch.equal(own[name], state[name]) for name in own)


def put(path: Path, state: object) -> Path:
    """Save an object with `torch.save`, and return its path."""
    torch.save(state, path)
    return path
