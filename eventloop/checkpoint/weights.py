"""Check that weights fit a model, and load them completely or not at all.

`Trainer.resume`, `Trainer.load_checkpoint` and the hooks that average weights use it.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parameter import is_lazy

from eventloop.checkpoint.external_weights import is_extra_state
from eventloop.state.rollback import Rollback
from eventloop.state.sharded import refuse_sharded_model
from eventloop.state.undo import Undo
from eventloop.util.errors import CheckpointError
from eventloop.util.text import error_text

logger = logging.getLogger("eventloop")

OWN = "own_state_dict"
"""The key of the weights with which a resumed run continues, if `state_dict` holds an average."""
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
    for module, name, buffer, value in buffers:
        buffer.copy_(value)
        if getattr(module, name) is not buffer:
            setattr(module, name, buffer)


def check_model_state(
    model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool, source: str
) -> list[str]:
    """Check that weights fit a model; return a line for each name that only one of them has.

    A model cannot hold weights of another kind, such as floating-point values in a buffer of integers. Kinds
    and shapes are not compared for modules with their own loading method, such as the observers of
    quantization, nor for the results of `get_extra_state`: they may depend on the data seen so far.

    Args:
        model: the model.
        state: the weights by name.
        strict: refuse names that only the weights or only the model has.
        source: the name of the checkpoint in messages.

    Raises:
        CheckpointError: shapes or kinds differ, weights and model have no name in common, or with `strict`
            names are missing or unexpected; the message lists each name with both shapes or types.
        TypeError: the model is sharded over ranks.
    """
    refuse_sharded_model(
        f"loading {source}", model, "Load it before fully_shard or distribute_tensor is applied."
    )
    own, free = model.state_dict(), _loading_by_themselves(model)
    wrong = [
        f"{name}: the checkpoint has {_shape(state[name])}, the model {_shape(own[name])}"
        for name in own
        if name in state and not is_lazy(own[name]) and _shape(state[name]) != _shape(own[name])
        if not name.startswith(free) and not is_extra_state(name)
    ]  # a lazy module takes the shape that is loaded
    wrong += [
        f"{name}: the checkpoint has {_kind(state[name])}, the model {_kind(own[name])}, which cannot hold it"
        for name in own
        if name in state and not name.startswith(free) and not _holds(own[name], state[name])
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
    named = strict or (bool(own) and own.keys().isdisjoint(state))
    if wrong or (named and strangers):
        lines = "\n  ".join(wrong + (strangers if named else []))
        raise CheckpointError(f"{source} does not fit the model; nothing was loaded:\n  {lines}\n{_ADVICE}")
    return strangers


def log_strangers(strangers: list[str], source: str) -> None:
    """Log the lines of `check_model_state` about names that only the weights or only the model has."""
    if strangers:
        lines = "\n  ".join(strangers)
        logger.warning("%s and the model differ in names; the common names were loaded:\n  %s", source, lines)


def prepare_model_state(
    model: torch.nn.Module, state: Mapping[str, Any], rollback: Rollback, *, strict: bool, source: str
) -> tuple[Callable[[], object], list[str]]:
    """Return a function that loads weights and cannot fail, and the lines of `check_model_state`.

    Prefixes of DistributedDataParallel and `torch.compile` are removed from the names first. If a module of
    the model might refuse the weights, they are loaded during this call, and `rollback` restores the former
    weights after an error; the returned function then does nothing.

    Raises:
        CheckpointError: `check_model_state` refuses the weights, or a module does.
        TypeError: the model is sharded over ranks.
    """
    state = _under_names_of(model, state)
    strangers = check_model_state(model, state, strict=strict, source=source)
    if _may_be_refused(model, state):
        before = copy.deepcopy(
            model.state_dict()
        )  # its attribute `_metadata` has the versions of the modules
        for name in [name for name, value in before.items() if is_lazy(value)]:
            del before[name]
        rollback.on_rollback("the model", partial(model.load_state_dict, before, strict=False))
        try:
            model.load_state_dict(state, strict=False)
        except Exception as error:
            what = f"{source} does not fit the model; nothing was loaded: {error_text(error)}"
            raise CheckpointError(f"{what}\n{_ADVICE}") from error

        return (lambda: None), strangers
    return partial(model.load_state_dict, state, strict=False), strangers


def _under_names_of(model: torch.nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the weights without the prefixes of wrappers, such as `module.`, if the model lacks them.

    A prefix is removed only if no name of the weights exists in the model.
    """
    own, renamed = model.state_dict().keys(), OrderedDict(state)
    # the versions of the modules, by which modules such as the observers of quantization load old states
    renamed._metadata = dict(getattr(state, "_metadata", {}))  # type: ignore[attr-defined]
    while renamed and own.isdisjoint(renamed):
        prefix = next(
            (each for each in _WRAPPERS if all(str(name).startswith(each) for name in renamed)), None
        )
        if prefix is None:
            return state
        consume_prefix_in_state_dict_if_present(renamed, prefix)
    return renamed


def _loading_by_themselves(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the prefixes, in the state dict, of the modules that override `_load_from_state_dict`."""
    return tuple(
        f"{name}." if name else ""
        for name, module in model.named_modules(remove_duplicate=False)
        if not _is_of_torch(module._load_from_state_dict)
    )


def _is_of_torch(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("torch.nn.modules.")


def _may_be_refused(model: torch.nn.Module, state: Mapping[str, Any]) -> bool:
    """Return whether loading might fail, because it does more than copy dense tensors."""
    own = model.state_dict()
    plain = all(_is_plain(own[name]) and _is_plain(state[name]) for name in own if name in state)
    return not (plain and all(map(_is_plainly_loaded, model.modules())))


def _is_plain(value: Any) -> bool:
    """Return whether a value is a dense tensor that can be copied into any other tensor of its shape."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_meta or value.is_complex())
    )


def _is_plainly_loaded(module: torch.nn.Module) -> bool:
    hooks = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)
    functions = (module.load_state_dict, module._load_from_state_dict, module.set_extra_state)
    return not any(hooks) and all(map(_is_of_torch, functions))


def _holds(own: Any, saved: Any) -> bool:
    """Return whether a tensor of the model can hold a saved one by PyTorch's rules of casting."""
    both = isinstance(own, torch.Tensor) and isinstance(saved, torch.Tensor)
    return not both or is_lazy(own) or own.is_quantized or torch.can_cast(saved.dtype, own.dtype)


def _kind(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _shape(value: Any) -> tuple[int, ...] | str:
    if is_lazy(value):
        return "no shape yet"
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
