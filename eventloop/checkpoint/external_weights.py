"""Read weights that other programs wrote: safetensors files, and files with a mapping of names to tensors.

`load_checkpoint` uses it, and gets every such file as a checkpoint with a `state_dict`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eventloop.checkpoint.weights import is_extra_state
from eventloop.util.errors import CheckpointError

WEIGHTS = "state_dict"
WRAPPINGS = ("model_state_dict", "model")
"""The keys under which other programs store what eventloop and MMEngine store under `state_dict`."""
_METADATA = frozenset({"format", "iter", "epoch", "eventloop"})
"""The keys of a published file's metadata that are not names of tied tensors."""


def read_safetensors(path: Path, map_location: Any = "cpu") -> dict[str, torch.Tensor]:
    """Read the tensors of a safetensors file by name, with all names of tied tensors.

    A tied tensor is stored once. The metadata has the stored name for each of its other names, as
    `safetensors.torch.save_model` and `publish` write it.

    Args:
        path: the file.
        map_location: the device of the tensors.

    Raises:
        ImportError: safetensors is not installed.
        TypeError: `map_location` is not a device.
        OSError: the file cannot be opened.
        CheckpointError: the file is not a safetensors file.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            f"reading {path} needs safetensors: pip install 'torch-eventloop[safetensors]'"
        ) from error
    if not isinstance(map_location, str | int | torch.device | None):
        raise TypeError(
            f"map_location must be a device for {path}, whose format stores no devices, got a "
            f"{type(map_location).__name__}"
        )
    device = "cpu" if map_location is None else str(torch.device(map_location))
    try:
        with safe_open(path, "pt", device=device) as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            metadata: Mapping[str, str] = file.metadata() or {}
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    tied = {
        name: tensors[stored]
        for name, stored in metadata.items()
        if name not in _METADATA and stored in tensors
    }
    return {**tied, **tensors}


def whole_objects(error: Exception) -> str:
    """Return the remedy for a file that holds objects of classes; "" if PyTorch's error has another cause.

    PyTorch's own text has control codes of a terminal and recommends to execute the file's code.

    Args:
        error: the error that `torch.load(weights_only=True)` raised.
    """
    match = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
    if match is None:
        return ""
    return (
        f"it holds objects of {match[1]}, as torch.save(model) writes them, and reading them would execute "
        "code of the file: save model.state_dict() instead"
    )


def as_checkpoint(state: object, path: Path) -> dict[str, Any]:
    """Return the contents of a file as a mapping with the weights under `state_dict`.

    In the file the weights may be under this key, under one of `WRAPPINGS`, or the whole contents.

    Args:
        state: the contents of the file.
        path: the file, for the message.

    Raises:
        CheckpointError: the file has weights in none of these forms.
    """
    if isinstance(state, dict) and isinstance(state.get(WEIGHTS), Mapping):
        return state
    if _are_weights(state):
        return {WEIGHTS: state}
    if isinstance(state, dict):
        for key in WRAPPINGS:
            if _are_weights(state.get(key)):
                others = {name: value for name, value in state.items() if name != key}
                return {WEIGHTS: state[key], **others}
    raise CheckpointError(
        f"{path} is not a checkpoint of eventloop: expected a mapping with a '{WEIGHTS}', "
        f"{' or '.join(map(repr, WRAPPINGS))}, or a model's tensors by their names, {_found(state)}. "
        "If it has weights, load them with model.load_state_dict(torch.load(path)[...])"
    )


def _are_weights(value: object) -> bool:
    """Return whether a value is a state dict: a mapping of names to tensors and extra states."""
    if not isinstance(value, Mapping) or not any(isinstance(each, torch.Tensor) for each in value.values()):
        return False
    return all(
        isinstance(name, str) and (isinstance(each, torch.Tensor) or is_extra_state(name))
        for name, each in value.items()
    )


def _found(state: object) -> str:
    """Describe the contents of a file that has no weights, as the end of "expected ..., got ..."."""
    if not isinstance(state, Mapping):
        return f"got a {type(state).__name__}"
    return f"got one with {', '.join(map(repr, list(state)[:8]))}" if state else "got an empty one"
