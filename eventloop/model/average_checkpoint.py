"""Store the average of a model's weights in a checkpoint, and read it from a checkpoint.

EMAHook uses this module. The layout is MMEngine's: `state_dict` has the averaged weights, so a program that
loads it gets the weights that were evaluated. `ema_state_dict["module.<name>"]` has the model's own weights,
and `ema_state_dict["steps"]` the number of updates of the average.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from eventloop.checkpoint import CheckpointError
from eventloop.checkpoint.weights import OWN, in_parts
from eventloop.model.average_pairs import Swap
from eventloop.model.averages import BaseAveragedModel
from eventloop.state.schema import Count, read_as

logger = logging.getLogger("eventloop")

KEY = "ema_state_dict"
"""The key of a checkpoint under which the model's own weights and the number of updates are stored."""
_PREFIX = "module."
"""The prefix that the names of the model's own weights have under `KEY`."""


def store(checkpoint: dict[str, Any], average: BaseAveragedModel, model: nn.Module, swap: Swap) -> None:
    """Replace a checkpoint's `state_dict` by the average, and store the model's own state as `KEY`.

    Args:
        checkpoint: the checkpoint, changed in place.
        average: the average.
        model: the model.
        swap: puts the average into the model during evaluations.
    """
    own: Mapping[str, Any] = checkpoint["state_dict"]
    if swap.active:  # the checkpoint refers to the model's tensors, which have the average's values now
        with swap.undone(average.pairs_with(model)):
            own = {name: _clone(value) for name, value in model.state_dict().items()}
    average.sync_buffers(model)
    averages = average.module.state_dict()
    averaged_state = dict(own)  # values that are no tensors are the model's own
    for name, value in own.items():
        if isinstance(value, torch.Tensor) and name in averages:
            averaged_state[name] = averages[name]
    checkpoint["state_dict"] = averaged_state
    checkpoint[KEY] = own_state(own, average.steps)


def own_state(weights: Mapping[str, Any], steps: int = 0) -> dict[str, Any]:
    """Return a model's own weights and the number of updates as a checkpoint stores them under `KEY`."""
    return {"steps": torch.tensor(steps), **{f"{_PREFIX}{name}": value for name, value in weights.items()}}


def check(checkpoint: Mapping[str, Any], *, strict: bool, source: str) -> None:
    """Check that the averaged and the own weights of a checkpoint belong to the same model.

    Args:
        checkpoint: the checkpoint; without `KEY` it has no average, and is accepted.
        strict: whether different names of the averaged and the own weights are an error, not a warning.
        source: the checkpoint's path, for the messages.

    Raises:
        CheckpointError: shapes differ, or with `strict` names differ.
    """
    if KEY not in checkpoint:
        return
    averaged = read_as(dict[str, Any], checkpoint.get("state_dict"), f"{source}: state_dict cannot be loaded")
    read_as(dict[str, Any], checkpoint[KEY], f"{source}: {KEY} cannot be loaded")
    own = own_weights(checkpoint)
    wrong_shapes = [
        f"{name}: {_shape(averaged[name])} in state_dict, {_shape(own[name])} in {KEY}"
        for name in averaged
        if name in own and _shape(averaged[name]) != _shape(own[name])
    ]
    wrong_names = [f"{name}: not in {KEY}" for name in averaged if name not in own]
    wrong_names += [f"{_PREFIX}{name}: not in state_dict" for name in own if name not in averaged]
    wrong_names += [
        f"{name}: not a name that an average stores" for name in checkpoint[KEY] if not _is_known(name)
    ]
    if wrong_shapes or (strict and wrong_names):
        lines = "\n  ".join(wrong_shapes + (wrong_names if strict else []))
        raise CheckpointError(
            f"{source} has the average of another model; nothing was loaded:\n  {lines}\n"
            "EMAHook(strict_load=False) begins the average as a copy where names are missing"
        )
    if wrong_names:
        logger.warning("the average in %s has other names than its model: %s", source, "; ".join(wrong_names))


def separate(checkpoint: dict[str, Any], name: str | None) -> None:
    """Move the model's own weights and the average of a checkpoint to the keys that a resume reads.

    The own weights are stored as `checkpoint[OWN]`; a name that the own weights lack gets its average. The
    average is stored as `checkpoint["hooks"][name]["average"]`, or None without an average.
    `state_dict` still has the average, for callers that only load weights.

    Args:
        checkpoint: the checkpoint, changed in place.
        name: the name of the EMAHook; a checkpoint without a state of this hook is not changed.
    """
    states = checkpoint.get("hooks")
    if not isinstance(states, Mapping) or not isinstance(states.get(name), Mapping):
        return
    averaged = None
    if KEY in checkpoint:
        averaged, own = checkpoint["state_dict"], own_weights(checkpoint)
        checkpoint[OWN] = {key: own.get(key, value) for key, value in averaged.items()}
    checkpoint["hooks"] = {**states, name: {**states[name], "average": averaged}}


class AverageState(msgspec.Struct):
    """The state of EMAHook in a checkpoint after `separate`: the number of updates, and the average."""

    steps: Count
    average: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET


def read_state(state: Mapping[str, Any]) -> AverageState:
    """Check a state of EMAHook and return it as an `AverageState`; raises CheckpointError if it is wrong."""
    return read_as(AverageState, state, "EMAHook cannot take its state")


def load_average(
    build: Callable[[nn.Module], BaseAveragedModel], model: nn.Module, saved: AverageState
) -> BaseAveragedModel | None:
    """Build an average of a model with the weights of a saved state, or without them as a copy of the model.

    Args:
        build: creates an average of a module.
        model: the model.
        saved: the state.

    Returns:
        the average, or None for a lazy model without saved weights, which cannot be copied yet.
    """
    weights = saved.average if saved.steps and saved.average is not msgspec.UNSET else None
    if saved.steps and weights is None:
        text = "the checkpoint has no %s: the average starts again as a copy of the model"
        logger.warning(text, KEY)
    if has_lazy_parts(model):
        if weights is None:
            return None
        model = deepcopy(model)
        model.load_state_dict(weights, strict=False)  # lazy parameters get their shapes
    average = build(model)
    if weights is not None:
        average.module.load_state_dict(in_parts(average.module, weights), strict=False)
        average.steps = saved.steps
    return average


def has_lazy_parts(model: nn.Module) -> bool:
    """Return whether the first forward pass of a model creates some of its parameters or buffers."""
    return any(is_lazy(tensor) for tensor in chain(model.parameters(), model.buffers()))


def own_weights(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's own weights that a checkpoint has under `KEY`, by their names in the model."""
    stored = checkpoint[KEY].items()
    return {name.removeprefix(_PREFIX): value for name, value in stored if name.startswith(_PREFIX)}


def _is_known(name: str) -> bool:
    """Return whether `own_state` stores something under this name."""
    return name == "steps" or name.startswith(_PREFIX)


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _shape(value: Any) -> tuple[int, ...] | str:
    """Return the shape of a tensor, or the name of the type of any other value."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
