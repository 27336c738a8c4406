"""Weights and the models they fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from eventloop.manifest import CheckpointError


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside what distributes or compiles it, so that its checkpoint fits either."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model


def check_model_state(
    model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool, source: str
) -> list[str]:
    """Check that weights fit a model; return the lines about names that exist on one side only.

    Raises:
        CheckpointError: shapes differ, or with `strict` names are missing or unexpected: every one is named,
            with both shapes.
    """
    own = model.state_dict()
    wrong = [
        f"{name}: the checkpoint has {_shape(state[name])}, the model {_shape(own[name])}"
        for name in own
        if name in state and not is_lazy(own[name]) and _shape(state[name]) != _shape(own[name])
    ]  # a lazy module takes the shape of what is loaded
    strangers = [
        f"{name}: {_shape(own[name])} in the model, not in the checkpoint"
        for name in own
        if name not in state
    ]
    strangers += [
        f"{name}: {_shape(state[name])} in the checkpoint, not in the model"
        for name in state
        if name not in own
    ]
    if wrong or (strict and strangers):
        lines = "\n  ".join(wrong + (strangers if strict else []))
        raise CheckpointError(f"{source} is of another model; nothing was loaded:\n  {lines}")
    return strangers


def load_model_state(
    model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool, source: str
) -> list[str]:
    """Load weights after `check_model_state`; a refused model is left as it was."""
    strangers = check_model_state(model, state, strict=strict, source=source)
    model.load_state_dict(state, strict=False)
    return strangers


def _shape(value: Any) -> tuple[int, ...] | str:
    if is_lazy(value):
        return "no shape yet"
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
