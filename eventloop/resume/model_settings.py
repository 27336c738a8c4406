"""Compare what a model is, besides its weights, with a checkpoint's; `TrainerState` calls it on a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from eventloop.resume.setting_changes import Change


def type_changes(model: torch.nn.Module, weights: Mapping[str, Any]) -> list[Change]:
    """Return the change of the types of buffers, if weights have a buffer of another type than the model."""
    pairs = {
        name: (_type(weights[name]), _type(buffer))
        for name, buffer in model.named_buffers()
        if isinstance(weights.get(name), torch.Tensor) and weights[name].dtype != buffer.dtype
    }
    if not pairs:
        return []
    saved, own = ({name: types[side] for name, types in pairs.items()} for side in (0, 1))
    return [Change("types of buffers", saved, own, "given")]


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
