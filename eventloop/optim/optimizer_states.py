"""Save, check and load the states of one optimizer, or of several optimizers by name, as in a GAN.

Checkpoints and the resume use it. Every function takes an optimizer, a mapping of names to optimizers, or
None.
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

    PyTorch converts the loaded values to the type of the parameters, which would round values that are kept
    in float32 for weights in bfloat16. This function restores the type in which they were saved, except for
    an optimizer with its own `load_state_dict`. For a parameter that is a DTensor, this rank's parts of whole
    tensors are loaded; DTensors and numbers such as `step` are loaded as they are.

    Args:
        optimizer: the optimizer or optimizers.
        state: the saved state.
        rollback: gets a function that restores the optimizer after an error. PyTorch's own loading only
            replaces two attributes; for an optimizer that loads differently, the state is copied first.
        converts: True keeps PyTorch's conversion, for parameters that were given another type on purpose.
        source: the name of the checkpoint in messages.

    Raises:
        CheckpointError: an optimizer refuses its state, or a state of a DTensor has another shape than it.
    """
    for name, each in named_optimizers(optimizer).items():
        own = state[name] if name else state
        of_torch = loads_as_torch(each)
        rollback.snapshot(
            f"the optimizer {name!r}" if name else "the optimizer",
            each,
            copies=not (of_torch and _plainly(each)),
        )
        with refusing(f"{source} has a state that the optimizer{f' {name!r}' if name else ''} refuses"):
            own = _in_parts(each, own, f"{source}: {_place(name)}")
            each.load_state_dict(own)
            if of_torch:
                numbers = (
                    {} if converts else {parameter: number for number, parameter in _by_number(each, own)}
                )
                _restore_types(each, {p: own["state"][n] for p, n in numbers.items() if n in own["state"]})


def loads_as_torch(optimizer: Any) -> bool:
    """Return whether PyTorch's `load_state_dict`, and no other, loads the state of an optimizer."""
    return getattr(type(optimizer), "load_state_dict", None) is _LOAD


def _plainly(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether PyTorch's code alone loads an optimizer's state, without hooks or a subclass's."""
    hooks = (optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks)
    return type(optimizer).__setstate__.__module__.startswith("torch.") and not any(hooks)


def _in_parts(optimizer: Any, saved: Any, what: str) -> Any:
    """Return the state with this rank's parts of the whole tensors that belong to DTensors."""
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
    """Yield the numbers of the saved states with the parameters to which they belong."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return zip(numbers, parameters, strict=True)


def _restore_types(optimizer: torch.optim.Optimizer, saved: Mapping[Any, Any]) -> None:
    """Give loaded values the types of the saved ones, and memory that begins as that of new ones.

    Tensors on the CPU may begin within a file's memory. PyTorch's sums round by the position of the numbers
    in memory, so LBFGS would go on with other weights.

    Args:
        saved: the saved states by parameter; a value without a saved one keeps its type.
    """
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def restored(loaded: Any, saved: Any) -> Any:
        if isinstance(loaded, dict):
            known = saved if isinstance(saved, Mapping) else {}
            # "step" stays as loaded: PyTorch decides its device and type
            return {k: restored(v, known.get(k) if k != "step" else None) for k, v in loaded.items()}
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
        if loaded.data_ptr() % 64 == 0:
            return loaded
        place = loaded.data_ptr(), loaded.shape
        if place not in copies:
            copies[place] = loaded.clone()
        return copies[place]

    for parameter, state in optimizer.state.items():
        optimizer.state[parameter] = restored(state, saved.get(parameter))


def check_optimizers(optimizer: Any, checkpoint: Mapping[str, Any], source: object) -> None:
    """Refuse a checkpoint of optimizers of other names or classes, or whose states have another layout."""
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
    """Refuse states whose param groups or tensors do not fit the optimizers', before anything is loaded."""
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
    for place, (parameter, number) in enumerate(zip(parameters, numbers, strict=True)):
        if is_lazy(parameter):
            continue
        for key, value in states.get(number, {}).items():
            shape = value.shape if isinstance(value, torch.Tensor) else torch.Size()
            if key != "step" and shape not in (torch.Size(), parameter.shape):
                raise CheckpointError(
                    f"{what}: {key!r} of its parameter {place} is wrong: expected the shape "
                    f"{tuple(parameter.shape)}, got {tuple(shape)}"
                )


def _has_shapes_of_parameters(optimizer: Any) -> bool:
    """Return whether each tensor of an optimizer's state is a number, or has the shape of its parameter."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ not in ("LBFGS", "Adafactor")


def _place(name: str) -> str:
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
