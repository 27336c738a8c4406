"""Check that weights fit a model, and load them completely or not at all.

`Trainer.resume`, `Trainer.load_checkpoint` and the hooks that average weights use it.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parameter import is_lazy

from eventloop.state.rollback import Rollback
from eventloop.state.sharded import is_dtensor, local_part, part_of, refuse_old_shards
from eventloop.state.undo import Undo
from eventloop.util.errors import CheckpointError
from eventloop.util.text import error_text

logger = logging.getLogger("eventloop")

OWN = "own_state_dict"
"""The checkpoint's key of the weights that a resumed run trains on, if `state_dict` has their average."""
LOADS_OWN = "loads_own"
"""The key that makes `load_checkpoint` load the weights under `OWN`, as a hook loads the average itself."""
_WRAPPERS = ("module.", "_orig_mod.")
"""The prefixes that DistributedDataParallel and `torch.compile` add to names."""
_ADVICE = (
    "Give the Trainer the model that was saved, or rename or remove entries of "
    "trainer.checkpoint['state_dict'] in a handler of after_load_checkpoint; if only names differ, "
    "load_checkpoint(path, strict=False) loads the names that both have"
)


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DistributedDataParallel, DataParallel and `torch.compile`.

    Its state dict has the same names whether or not it is wrapped.
    """
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model


def is_extra_state(name: str) -> bool:
    """Return whether a name in a state dict holds the result of a module's `get_extra_state`."""
    return name.rpartition(".")[2] == "_extra_state"


def save_modes(undo: Undo, model: torch.nn.Module) -> None:
    """Let `undo` restore the train or eval mode of each module."""
    undo.step(_set_modes, [(module, module.training) for module in model.modules()])


def save_modes_and_buffers(undo: Undo, model: torch.nn.Module) -> None:
    """Let `undo` restore the train or eval mode and the buffers of all modules, in place."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if not is_lazy(buffer)
    ]
    undo.step(_set_buffers, buffers)
    save_modes(undo, model)


def _set_modes(modes: list[tuple[torch.nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


@torch.no_grad()
def _set_buffers(buffers: list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]]) -> None:
    """Copy values into buffers in place, and put back a buffer that the module has replaced since."""
    for module, name, buffer, value in buffers:
        buffer.copy_(value)
        if getattr(module, name) is not buffer:
            setattr(module, name, buffer)


def check_model_state(
    model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool, source: str
) -> list[str]:
    """Check that weights fit a model; return a line for each name that only one of them has.

    A model cannot hold weights of another kind, such as floating-point values in a buffer of integers. Nor
    can it hold values beyond the range of its type, such as 300 in int8 or 1e5 in float16. Modules with their
    own loading method, such as the observers of quantization, are not compared, because their shapes and
    kinds may depend on the data seen so far. Nor are the shapes of results of `get_extra_state`.

    Args:
        model: the model, which may have DTensors.
        state: the weights by name. For a DTensor of the model it has the whole tensor, or a DTensor with the
            same layout.
        strict: refuse names that only the weights or only the model has.
        source: the name of the checkpoint in messages.

    Raises:
        CheckpointError: shapes or kinds differ, values are out of range, weights and model have no name in
            common, or with `strict` names are missing or unexpected; the message lists each name with both
            shapes or types, and the names that may have been renamed.
        TypeError: the model is sharded by FSDP1 or has a ShardedTensor.
    """
    refuse_old_shards(f"loading {source}", model)
    own, free = model.state_dict(), _loading_by_themselves(model)
    # without most names, for speed: between plain tensors of one shape and type nothing can differ
    others = [name for name in own if name in state and not _are_alike(own[name], state[name])]
    misfits = [
        f"{name}: the checkpoint has {_shape(state[name])}, the model {_shape(own[name])}"
        for name in others
        if not is_lazy(own[name]) and _shape(state[name]) != _shape(own[name])
        if not name.startswith(free) and not is_extra_state(name)
    ]  # a lazy module takes the shape that is loaded
    misfits += [
        f"{name}: the checkpoint has {what}, the model {_kind(own[name])}, which cannot hold it"
        for name in others
        if not name.startswith(free) and (what := _not_held(own[name], state[name]))
    ]
    misfits += [
        f"{name}: the checkpoint has the layout {_layout(state[name])}, the model {_layout(own[name])}"
        for name in others
        if is_dtensor(state[name]) and _layout(state[name]) != _layout(own[name])
    ]
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
    refuses_strangers = strict or (bool(own) and own.keys().isdisjoint(state))
    if misfits or (refuses_strangers and strangers):
        lines = "\n  ".join(misfits + (strangers if refuses_strangers else []))
        advice = renaming_advice(own, state) + _ADVICE if refuses_strangers else _ADVICE
        raise CheckpointError(f"{source} does not fit the model; nothing was loaded:\n  {lines}\n{advice}")
    return strangers


def _are_alike(own: Any, saved: Any) -> bool:
    """Return whether two values are plain tensors of one shape and type, as most are."""
    plain = type(own) is torch.Tensor and type(saved) is torch.Tensor
    return plain and own.shape == saved.shape and own.dtype == saved.dtype


def renaming_advice(own: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Return how to load entries that were probably renamed, as a part of an error's text; "" if none were.

    Args:
        own: the model's tensors by name.
        state: the weights by name.
    """
    pairs = _renamed(
        {name: _shape(value) for name, value in state.items() if name not in own},
        {name: _shape(value) for name, value in own.items() if name not in state},
    )
    if not pairs:
        return ""
    parts = Counter(_without_common_end(*pair) for pair in pairs.items())
    fits = ", ".join(f"{old!r} -> {new!r} ({count} of them)" for (old, new), count in parts.items())
    old, new = next(iter(pairs.items()))
    return (
        f"By their shapes these may be the same under other names: {fits}. If so, write for each in a "
        f"handler of after_load_checkpoint: weights = trainer.checkpoint['state_dict']; weights[{new!r}] = "
        f"weights.pop({old!r}). A resume then finds the state of the optimizer, too. Otherwise: "
    )


def _renamed(gone: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Return the new name of each renamed entry, by its old name, as far as it is certain.

    Two names fit if their shapes are equal, and they have more parts at the end in common than other such
    pairs. A pair is returned if the two names fit each other and no other name.

    Args:
        gone: the shapes of the entries that only the weights have, by name.
        new: the shapes of the entries that only the model has, by name.
    """

    def fitting(name: str, shape: Any, others: Mapping[str, Any]) -> list[str]:
        lengths = {other: len(_common_end(name, other)) for other, its in others.items() if its == shape}
        return [other for other, length in lengths.items() if length == max(lengths.values())]

    pairs = {old: fits[0] for old, shape in gone.items() if len(fits := fitting(old, shape, new)) == 1}
    return {old: name for old, name in pairs.items() if fitting(name, new[name], gone) == [old]}


def _common_end(a: str, b: str) -> list[str]:
    """Return the last parts, separated by dots, that two names have in common, the last one first."""
    pairs = zip(reversed(a.split(".")), reversed(b.split(".")), strict=False)
    return [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _without_common_end(a: str, b: str) -> tuple[str, str]:
    """Return the beginnings by which two names differ, such as "net." and "backbone."."""
    length = sum(len(part) + 1 for part in _common_end(a, b))
    return a[: len(a) - length], b[: len(b) - length]


def log_strangers(strangers: list[str], source: str) -> None:
    """Log the lines of `check_model_state` about names that only the weights or only the model has."""
    if strangers:
        lines = "\n  ".join(strangers)
        logger.warning("%s and the model differ in names; the common names were loaded:\n  %s", source, lines)


def prepare_model_state(
    model: torch.nn.Module, state: Mapping[str, Any], rollback: Rollback, *, strict: bool, source: str
) -> tuple[Callable[[], object], list[str]]:
    """Return a function that loads weights and cannot fail, and the lines of `check_model_state`.

    Prefixes of DistributedDataParallel and `torch.compile` are removed from the names first, and each DTensor
    of the model gets this rank's part of a whole tensor. If a module of the model might refuse the weights,
    they are loaded during this call, and `rollback` restores the former weights after an error; the returned
    function then does nothing.

    Args:
        model, state, strict, source: as in `check_model_state`.
        rollback: gets a function that restores the former weights, if they may change during this call.

    Raises:
        CheckpointError: `check_model_state` refuses the weights, or a module does.
        TypeError: the model is sharded by FSDP1 or has a ShardedTensor.
    """
    state = _under_names_of(model, state)
    strangers = check_model_state(model, state, strict=strict, source=source)
    state = in_parts(model, state)
    if _may_be_refused(model, state):
        # a deep copy also has the attribute `_metadata`, with the versions of the modules
        before = copy.deepcopy(model.state_dict())
        for name in [name for name, value in before.items() if is_lazy(value)]:
            del before[name]
        rollback.on_rollback("the model", partial(model.load_state_dict, before, strict=False))
        try:
            model.load_state_dict(state, strict=False)
        except Exception as error:
            message = f"{source} does not fit the model; nothing was loaded: {error_text(error)}"
            raise CheckpointError(f"{message}\n{_ADVICE}") from error

        return (lambda: None), strangers
    return partial(model.load_state_dict, state, strict=False), strangers


def _under_names_of(model: torch.nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the weights without the prefixes of wrappers, such as `module.`, if the model lacks them.

    A prefix is removed only if no name of the weights exists in the model.
    """
    own, renamed = model.state_dict().keys(), OrderedDict(state)
    # `_metadata` has the modules' versions, which modules such as observers of quantization need to load
    renamed._metadata = dict(getattr(state, "_metadata", {}))  # type: ignore[attr-defined]
    while renamed and own.isdisjoint(renamed):
        prefix = next(
            (each for each in _WRAPPERS if all(str(name).startswith(each) for name in renamed)), None
        )
        if prefix is None:
            return state
        consume_prefix_in_state_dict_if_present(renamed, prefix)
    return renamed


def in_parts(model: torch.nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return weights with this rank's part in place of each tensor that is a DTensor in the model."""
    own, parts = model.state_dict(), OrderedDict(state)
    # `_metadata` has the modules' versions, which some modules need to load
    parts._metadata = getattr(state, "_metadata", {})  # type: ignore[attr-defined]
    for name, value in state.items():
        is_whole = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        if is_whole and is_dtensor(own.get(name)) and _shape(value) == _shape(own[name]):
            parts[name] = part_of(value, own[name])
    return parts


def _loading_by_themselves(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the prefixes, in the state dict, of the modules that override `_load_from_state_dict`."""
    return tuple(
        [
            f"{name}." if name else ""
            for name, module in model.named_modules(remove_duplicate=False)
            if not str(getattr(module._load_from_state_dict, "__module__", "")).startswith(_TORCH)
        ]
    )


_TORCH, _FSDP2 = "torch.nn.modules.", "torch.distributed.fsdp."
"""The beginnings of the names of the modules that define PyTorch's layers, and FSDP2."""


def _are_of(package: str, functions: Iterable[Any]) -> bool:
    """Return whether all functions are defined in modules whose names begin with `package`."""
    return not [each for each in functions if not str(getattr(each, "__module__", "")).startswith(package)]


def _may_be_refused(model: torch.nn.Module, state: Mapping[str, Any]) -> bool:
    """Return whether the model might refuse weights: whether it does more than copy dense tensors."""
    own = model.state_dict()
    tensors = [value for name in own if name in state for value in (own[name], state[name])]
    functions, hooks = list[Any](), list[Any]()
    for module in model.modules():
        functions += (module.load_state_dict, module._load_from_state_dict, module.set_extra_state)
        hooks += module._load_state_dict_pre_hooks.values()
        hooks += module._load_state_dict_post_hooks.values()
    # the hooks of FSDP2 only free gathered weights, and refuse nothing
    return not (all(map(_is_plain, tensors)) and _are_of(_TORCH, functions) and _are_of(_FSDP2, hooks))


def _is_plain(value: Any) -> bool:
    """Return whether a value is a dense tensor that can be copied into any other tensor of its shape."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        value = local_part(value)
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_meta or value.is_complex())
    )


def _not_held(own: Any, saved: Any) -> str:
    """Describe why a tensor of the model cannot take the values of a saved tensor; return "" if it can.

    PyTorch may not cast the saved type to that of the model, or a value may be out of its range.
    """
    are_tensors = isinstance(own, torch.Tensor) and isinstance(saved, torch.Tensor)
    if not are_tensors or is_lazy(own) or own.is_quantized or own.dtype == saved.dtype:
        return ""
    if not torch.can_cast(saved.dtype, own.dtype):
        return _kind(saved)
    saved = local_part(saved)
    if saved.is_meta or not saved.numel() or saved.layout is not torch.strided or saved.is_quantized:
        return ""
    if not (own.is_floating_point() or own.is_complex()):
        limits = torch.iinfo(own.dtype)
        wide = saved.to(torch.float64 if saved.dtype == torch.uint64 else torch.int64)
        least, most = int(wide.min()), int(wide.max())
        return "" if limits.min <= least and most <= limits.max else f"{_kind(saved)} from {least} to {most}"
    sizes = (saved if saved.is_floating_point() or saved.is_complex() else saved.double()).abs()
    limit = torch.finfo(own.dtype).max
    beyond = sizes[torch.isfinite(sizes) & (sizes > limit)] if torch.finfo(sizes.dtype).max > limit else ()
    return f"{_kind(saved)} up to {float(max(beyond)):g}" if len(beyond) else ""


def _kind(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _layout(value: Any) -> Any:
    """Return the placements and the mesh of a DTensor, or a text for any other tensor."""
    return (value.placements, value.device_mesh) if is_dtensor(value) else "of a plain tensor"


def _shape(value: Any) -> tuple[int, ...] | str:
    """Return the shape of a tensor, or a text for a lazy one; the name of its class for any other value."""
    if is_lazy(value):
        return "no shape yet"
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
