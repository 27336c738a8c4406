"""Weights as other programs write them: safetensors, and files that have the tensors by name and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eventloop.util.errors import CheckpointError

WEIGHTS = "state_dict"
WRAPPINGS = ("model_state_dict", "model")
"""Where others have the weights that eventloop and MMEngine have at `state_dict`."""
_SAID = frozenset({"format", "iter", "epoch", "eventloop"})
"""What publishing says in the metadata besides which of tied tensors stands for which."""


def read_safetensors(path: Path, map_location: Any = "cpu") -> dict[str, torch.Tensor]:
    """The tensors of a file by name, also those that another one of the same memory was written for: which stands for
    which is in the metadata, as `safetensors.torch.save_model` and publishing write it.

    Raises:
        ImportError: safetensors is not installed.
        TypeError: `map_location` is no device.
        OSError, CheckpointError: it cannot be read, or is no such file.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            f"reading {path} needs safetensors: pip install 'torch-eventloop[safetensors]'"
        ) from error
    if not isinstance(map_location, str | int | torch.device | None):
        raise TypeError(
            f"map_location must be a device for {path}, which says none itself, got a {type(map_location).__name__}"
        )
    device = "cpu" if map_location is None else str(torch.device(map_location))
    try:
        with safe_open(path, "pt", device=device) as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            said: Mapping[str, str] = file.metadata() or {}
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    tied = {name: tensors[first] for name, first in said.items() if name not in _SAID and first in tensors}
    return {**tied, **tensors}


def as_checkpoint(state: object, path: Path) -> dict[str, Any]:
    """What a file holds as a mapping with the weights at `state_dict`, where they may be all that it has, or at one of
    `WRAPPINGS`.

    Raises:
        CheckpointError: there are none in it.
    """
    if isinstance(state, dict) and isinstance(state.get(WEIGHTS), Mapping):
        return state
    if _are_weights(state):
        return {WEIGHTS: state}
    if isinstance(state, dict):
        for key in WRAPPINGS:
            if _are_weights(state.get(key)):
                return {WEIGHTS: state[key], **{name: each for name, each in state.items() if name != key}}
    raise CheckpointError(
        f"{path} is no checkpoint of eventloop: expected a mapping with a '{WEIGHTS}', {' or '.join(map(repr, WRAPPINGS))}, "
        f"or a model's tensors by their names, {_found(state)}. Where it has weights, "
        "model.load_state_dict(torch.load(path)[...]) takes them"
    )


def _are_weights(value: object) -> bool:
    """A state dict: nothing but tensors, and what modules say of themselves."""
    if not isinstance(value, Mapping) or not any(isinstance(each, torch.Tensor) for each in value.values()):
        return False
    return all(
        isinstance(name, str) and (isinstance(each, torch.Tensor) or is_extra_state(name))
        for name, each in value.items()
    )


def is_extra_state(name: str) -> bool:
    """It is what `get_extra_state` of a module returned, which may be anything."""
    return name.rpartition(".")[2] == "_extra_state"


def _found(state: object) -> str:
    if not isinstance(state, Mapping):
        return f"got a {type(state).__name__}"
    return f"got one with {', '.join(map(repr, list(state)[:8]))}" if state else "got an empty one"
