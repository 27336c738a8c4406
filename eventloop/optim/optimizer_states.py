"""Save, check and load the states of one optimizer, or of several optimizers by name, as in a GAN.

Checkpoints and the resume use it. The argument `optimizer` of a public function is an optimizer, a mapping
from names to optimizers, or None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch.nn.parameter import is_lazy

from eventloop.optim.optimizers import named_optimizers
from eventloop.state.rollback import Rollback
from eventloop.state.schema import check_alike, read_as, refusing
from eventloop.state.sharded import is_dtensor, part_of
from eventloop.util.errors import CheckpointError

_LOAD = torch.optim.Optimizer.load_state_dict


def class_names(optimizer: Any) -> Any:
    """Return the optimizer's class name, or a mapping of class names, for comparison with a checkpoint's."""
    if isinstance(optimizer, Mapping):
        return {name: type(each).__name__ for name, each in optimizer.items()}
    return None if optimizer is None else type(optimizer).__name__


def optimizer_state(optimizer: Any) -> Any:
    """Return the state of an optimizer, or a mapping of states by name; None without an optimizer."""
    if isinstance(optimizer, Mapping):
        return {name: each.state_dict() for name, each in optimizer.items()}
    return None if optimizer is None else optimizer.state_dict()


def load_optimizer_state(
    optimizer: Any, state: Any, rollback: Rollback, *, converts: bool = False, source: object = "the state"
) -> None:
    """Load the result of `optimizer_state`; without an optimizer nothing is loaded.

    PyTorch converts the loaded values to the type of the parameters. For weights in bfloat16 this would round
    values that the optimizer keeps in float32. So this function restores the type in which the values were
    saved, except for an optimizer with its own `load_state_dict`. The state of a parameter that is a DTensor
    may have been saved as whole tensors: then this rank's parts of them are loaded.

    Args:
        optimizer: the optimizer or optimizers.
        state: the saved state.
        rollback: gets a function that restores the optimizer after an error. PyTorch's own loading only
            replaces two attributes; for an optimizer that loads differently, the state is copied first.
        converts: whether PyTorch's conversion is kept, because the user has changed the type of the
            parameters since the checkpoint.
        source: the name of the checkpoint in messages.

    Raises:
        CheckpointError: an optimizer refuses its state, or a value for a DTensor has another shape than that.
    """
    for name, each in named_optimizers(optimizer).items():
        own = state[name] if name else state
        of_torch = loads_as_torch(each)
        rollback.snapshot(
            f"the optimizer {name!r}" if name else "the optimizer",
            each,
            copies=not (of_torch and _loads_plainly(each)),
        )
        with refusing(f"{source} has a state that the optimizer{f' {name!r}' if name else ''} refuses"):
            own = _in_parts(each, own, f"{source}: {_place(name)}")
            each.load_state_dict(own)
            if of_torch:
                saved_numbers = (
                    {} if converts else {parameter: number for number, parameter in _by_number(each, own)}
                )
                saved_states = {
                    parameter: own["state"][number]
                    for parameter, number in saved_numbers.items()
                    if number in own["state"]
                }
                _restore_types(each, saved_states)


def loads_as_torch(optimizer: Any) -> bool:
    """Return whether PyTorch's `load_state_dict`, and no other, loads the state of an optimizer."""
    return getattr(type(optimizer), "load_state_dict", None) is _LOAD


def _loads_plainly(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether no code of the user's, a hook or a `__setstate__`, is called when a state is loaded."""
    hooks = (optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks)
    return type(optimizer).__setstate__.__module__.startswith("torch.") and not any(hooks)


def _in_parts(optimizer: Any, saved: Any, what: str) -> Any:
    """Return a saved state in which whole tensors for DTensors are replaced by this rank's parts of them.

    Args:
        what: the name of the state in messages.
    """
    if not any(map(is_dtensor, [each for group in optimizer.param_groups for each in group["params"]])):
        return saved
    states = dict(saved["state"])
    for number, parameter in _by_number(optimizer, saved):
        if number in states and is_dtensor(parameter):
            states[number] = {
                key: _part(value, key, parameter, f"{what}: {key!r} of its parameter {number}")
                for key, value in states[number].items()
            }
    return {**saved, "state": states}


def _part(value: Any, key: str, parameter: Any, what: str) -> Any:
    """Return this rank's part of a value in the state of a parameter; numbers and DTensors as they are.

    Args:
        key: the key of the value in the state.
        what: the name of the value in messages.
    """
    if not isinstance(value, torch.Tensor) or is_dtensor(value) or key == "step":
        return value
    if value.shape == parameter.shape:
        return part_of(value, parameter)
    if value.shape:
        raise CheckpointError(
            f"{what} cannot be divided as the parameter is, by placements {parameter.placements}: expected "
            f"the shape {tuple(parameter.shape)}, got {tuple(value.shape)}. Load it into a model that is not "
            "sharded, or call load_checkpoint(path), which loads the weights alone"
        )
    return value


def _by_number(optimizer: Any, saved: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of the number that a parameter has in a saved state, and the parameter."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return zip(numbers, parameters, strict=True)


def _restore_types(optimizer: torch.optim.Optimizer, saved: Mapping[Any, Any]) -> None:
    """Give loaded values the types in which they were saved, and aligned memory, as new tensors have it.

    A loaded tensor on the CPU may be a view into a file's memory that begins at any byte. PyTorch's sums
    round differently then, so LBFGS would continue with other weights. Such a tensor is copied.

    Args:
        optimizer: the optimizer, with the loaded states.
        saved: the saved states by parameter; a value without a saved one keeps its type.
    """
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}  # by address: values that share memory still do

    def restored(loaded: Any, saved: Any) -> Any:
        """Return a loaded value with the saved one's type, in aligned memory; shared memory stays shared."""
        if isinstance(loaded, dict):
            saved_values = saved if isinstance(saved, Mapping) else {}
            # "step" stays as loaded: PyTorch decides its device and type
            return {
                key: restored(value, saved_values.get(key) if key != "step" else None)
                for key, value in loaded.items()
            }
        if isinstance(loaded, list):
            alike = isinstance(saved, list | tuple) and len(saved) == len(loaded)
            return [*map(restored, loaded, saved if alike else [None] * len(loaded))]
        if (
            isinstance(loaded, torch.Tensor)
            and isinstance(saved, torch.Tensor)
            and loaded.dtype != saved.dtype
        ):
            loaded = saved.to(loaded.device)
        if type(loaded) is not torch.Tensor or loaded.layout is not torch.strided or not loaded.is_cpu:
            return loaded
        if loaded.data_ptr() % 64 == 0:  # aligned as PyTorch aligns new tensors, in bytes
            return loaded
        address = loaded.data_ptr(), loaded.shape
        if address not in copies:
            copies[address] = loaded.clone()
        return copies[address]

    for parameter, state in optimizer.state.items():
        optimizer.state[parameter] = restored(state, saved.get(parameter))


def check_optimizers(optimizer: Any, checkpoint: Mapping[str, Any], source: object) -> None:
    """Refuse a checkpoint whose optimizers have other names or classes, or malformed states.

    Args:
        checkpoint: the contents of the checkpoint.
        source: its path, for messages.

    Raises:
        CheckpointError: the checkpoint is refused.
    """
    saved_names, state = checkpoint["meta"]["optimizer"], checkpoint["optimizer"]
    if optimizer is not None and saved_names != class_names(optimizer):
        raise CheckpointError(
            f"{source} is of another optimizer: {saved_names}, the trainer has {class_names(optimizer)}: "
            "give it that one, or call load_checkpoint(path), which loads the weights alone"
        )
    for name, each in named_optimizers(optimizer).items():
        own = state.get(name) if name and isinstance(state, Mapping) else state
        saved = read_as(_State, own, f"{source}: {_place(name)} cannot be loaded")
        if loads_as_torch(each):
            what = f"{source}: {_place(name)}['state'] cannot be loaded"
            read_as(dict[Any, dict[Any, Any]], saved.state, what)


def check_groups(optimizer: Any, state: Any, source: object) -> None:
    """Refuse saved states whose param groups or tensors do not fit the optimizers.

    Args:
        state: the result of `optimizer_state` in a checkpoint.
        source: the path of the checkpoint, for messages.

    Raises:
        CheckpointError: a state is refused.
    """
    for name, each in named_optimizers(optimizer).items():
        own = state[name] if name else state
        groups: list[dict[str, Any]] = own["param_groups"]
        sizes, saved_sizes = _group_sizes(each.param_groups), _group_sizes(groups)
        if sizes != saved_sizes:
            raise CheckpointError(
                f"{source} is of another optimizer: {f'of {name!r} ' if name else ''}its parameter groups "
                f"have {saved_sizes} parameters, the trainer's {sizes}: give the optimizer the groups of the "
                "checkpoint, or call load_checkpoint(path), which loads the weights alone"
            )
        for number, (former, group) in enumerate(zip(groups, each.param_groups, strict=True)):
            what = f"{source}: {_place(name)}.param_groups[{number}]"
            check_alike({**former, "params": None}, group, what)
            with refusing(f"{what}['lr'] must be a number, got {former.get('lr')!r}"):
                float(former.get("lr", 0.0))
            if _has_shapes_of_parameters(each):
                with refusing(f"{what}['params'] are not the numbers of its states"):
                    _check_shapes(group["params"], former["params"], own["state"], what)


def _check_shapes(parameters: list[Any], numbers: list[Any], states: Mapping[Any, Any], what: str) -> None:
    """Refuse saved tensors that have another shape than their parameter.

    Args:
        parameters: the parameters of a param group.
        numbers: the numbers of these parameters in the saved state.
        states: the saved states by number.
        what: the name of the group in messages.
    """
    for index, (parameter, number) in enumerate(zip(parameters, numbers, strict=True)):
        if is_lazy(parameter):  # it has no shape yet
            continue
        for key, value in states.get(number, {}).items():
            shape = value.shape if isinstance(value, torch.Tensor) else torch.Size()
            if key != "step" and shape not in (torch.Size(), parameter.shape):
                raise CheckpointError(
                    f"{what}: {key!r} of its parameter {index} is wrong: expected the shape "
                    f"{tuple(parameter.shape)}, got {tuple(shape)}"
                )


def _has_shapes_of_parameters(optimizer: Any) -> bool:
    """Return whether each tensor of an optimizer's state is a number, or has the shape of its parameter."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ not in ("LBFGS", "Adafactor")


def _place(name: str) -> str:
    """Return the key of an optimizer's state in a checkpoint, for messages."""
    return f"optimizer[{name!r}]" if name else "optimizer"


class _State(msgspec.Struct):
    """The entries that the state of every optimizer has."""

    param_groups: list[dict[str, Any]]
    state: Any = None

    def __post_init__(self) -> None:
        if any(not isinstance(group.get("params"), list) for group in self.param_groups):
            raise ValueError("each of `param_groups` must have a list `params`")


def _group_sizes(groups: list[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]
