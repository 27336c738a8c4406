"""Split a training's state into the tensors that go to shards and the rest, and join them again.

The tensors of the weights, of their running average and of the optimizers' states go to shards, the files
that all ranks write. Tensors that are not sharded go there, too, so that other programs find all of them.
Their keys are those that PyTorch's distributed checkpoint gives to
`{"state_dict": ..., "optimizer": {<parameter>: {<state>: ...}}}`. In the rest of the state each of them is
replaced by an `Absent`, and in the file by a tensor without memory, on the device "meta".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from eventloop.optim.parameter_names import labels_of
from eventloop.state.keys import SHARDED

*WEIGHTS, OPTIMIZER = SHARDED
_PREFIX = "module."
"""The prefix that "ema_state_dict", the running average, has before the model's names."""


class Place(NamedTuple):
    """The place of a tensor in a state, and its key in the shards.

    Attributes:
        path: the keys that lead to it in the state.
        names: the parts of its key in the shards, in which a parameter's name replaces its number.
        parameter: the name of the parameter or buffer, or of the parameter to whose optimizer state the
            tensor belongs.
    """

    path: tuple[Any, ...]
    names: tuple[str, ...]
    parameter: str

    @property
    def key(self) -> str:
        """The key in the index of the shards."""
        return ".".join(self.names)


class Absent:
    """The shape and the type of a tensor that goes to shards, in its place in the rest of the state.

    The training thread makes these objects, and the thread that encodes the rest makes tensors without memory
    of them.
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Place, torch.Tensor]]:
    """Return a state with an `Absent` for each tensor that goes to shards, and these tensors by place."""
    tensors: dict[Place, torch.Tensor] = {}

    def cut_out(place: Place, tensor: torch.Tensor) -> torch.Tensor | Absent:
        """Replace a tensor by `Absent`, unless it has a layout that shards cannot hold."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            return tensor
        tensors[place] = tensor
        return Absent(tensor)

    return replaced(state, cut_out), tensors


def with_empty_tensors(rest: Any) -> Any:
    """Return a copy of the rest with a tensor on the device "meta" in place of each `Absent`."""
    if isinstance(rest, Absent):
        return torch.empty(rest.shape, dtype=rest.dtype, device="meta")
    if isinstance(rest, dict):
        return {key: with_empty_tensors(value) for key, value in rest.items()}
    return rest


def replaced(state: Mapping[str, Any], change: Callable[[Place, torch.Tensor], Any]) -> dict[str, Any]:
    """Return a state with the result of `change` for each tensor of the weights and optimizer states.

    Args:
        state: the state.
        change: called with the place of a tensor, and the tensor.
    """
    result = dict(state)
    for key in WEIGHTS:
        if isinstance(state.get(key), Mapping):
            result[key] = {
                name: change(Place((key, name), (key, name), name.removeprefix(_PREFIX)), value)
                if isinstance(value, torch.Tensor)
                else value
                for name, value in state[key].items()
            }
    if isinstance(state.get(OPTIMIZER), Mapping):
        result[OPTIMIZER] = _optimizers(state, change)
    return result


def _optimizers(state: Mapping[str, Any], change: Callable[[Place, torch.Tensor], Any]) -> dict[str, Any]:
    """Return the state of the optimizer, or the states of several by name, with changed tensors."""
    saved, names = state[OPTIMIZER], state["meta"].get("parameters", {})
    if "" in names:  # a single optimizer, which has no name
        return _optimizer(saved, "", names[""], change)
    return {name: _optimizer(one, name, names.get(name, []), change) for name, one in saved.items()}


def _optimizer(
    state: Mapping[str, Any],
    name: str,
    groups: list[str],
    change: Callable[[Place, torch.Tensor], Any],
) -> dict[str, Any]:
    """Return an optimizer's state with the changed tensors of its parameters' states.

    Args:
        state: the `state_dict` of the optimizer.
        name: the optimizer's name; "" for a single one.
        groups: the names of its parameters, as `meta` has them.
        change: as in `replaced`.
    """
    path = (OPTIMIZER, name) if name else (OPTIMIZER,)
    names_by_number = dict(_names(state, groups))

    def changed(value: Any, number: Any, keys: tuple[Any, ...]) -> Any:
        """Return a value with its tensors changed, each named by its parameter."""
        if isinstance(value, torch.Tensor):
            parameter = names_by_number.get(number, str(number))
            names = (*path, parameter, *map(str, keys))
            return change(Place((*path, "state", number, *keys), names, parameter), value)
        if isinstance(value, Mapping):
            return {key: changed(item, number, (*keys, key)) for key, item in value.items()}
        return value

    states = {number: changed(value, number, ()) for number, value in state["state"].items()}
    return {**state, "state": states}


def _names(state: Mapping[str, Any], groups: list[str]) -> Iterator[tuple[Any, str]]:
    """Yield the number and the name of each parameter of an optimizer's state."""
    labels = labels_of(groups, (len(group["params"]) for group in state["param_groups"]), "the state")
    for group, names in zip(state["param_groups"], labels, strict=True):
        yield from zip(group["params"], names, strict=True)
