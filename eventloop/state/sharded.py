"""Refuse tensors that are sharded over ranks, as FSDP2 and tensor parallelism make them.

Checkpoints, averages and metrics would otherwise silently hold one rank's part of such a tensor.
"""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any

import torch

GATHER = "Gather it first: full_tensor(), called on all ranks."
NO_SHARDED_SAVES = (
    "Sharded checkpoints are not supported yet: train with default_hooks=dict(checkpoint=None), and save "
    "what full_tensor() gathers on all ranks."
)
FULLY_SHARD = "Shard models by fully_shard of torch.distributed.fsdp (FSDP2)."


def is_sharded(value: object) -> bool:
    """Return whether `value` is a DTensor or a ShardedTensor, without importing their modules."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return False
    return is_dtensor(value) or isinstance(value, _sharded_tensor())


def is_dtensor(value: object) -> bool:
    """Return whether `value` is a DTensor, without importing its module."""
    return isinstance(value, _class("torch.distributed.tensor", "DTensor"))


def refuse_old_shards(what: str, model: torch.nn.Module) -> None:
    """Raise TypeError if FSDP1 wraps a part of `model`, or one of its parameters is a ShardedTensor.

    Args:
        what: the feature that would take one rank's part for the whole, which begins the message.
    """
    for name, module in model.named_modules():
        if isinstance(module, _fsdp1()):
            raise TypeError(
                f"{what}: the module {name!r} of the model is sharded over ranks: expected plain "
                f"parameters or DTensors, got a {type(module).__name__}. {FULLY_SHARD}"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, _sharded_tensor()):
            refuse_sharded(f"{what}: {name!r} of the model", parameter, FULLY_SHARD)


def refuse_sharded(where: str, value: Any, advice: str = GATHER) -> None:
    """Raise TypeError if `value` is sharded over ranks.

    Args:
        where: the name of the value, which begins the message.
        advice: the last sentence of the message.
    """
    if is_sharded(value):
        placements = f", placements {value.placements}" if hasattr(value, "placements") else ""
        raise TypeError(
            f"{where} is sharded over ranks: expected a plain tensor, got a {type(value).__name__} of shape "
            f"{tuple(value.shape)}{placements}. {advice}"
        )


def refuse_sharded_model(what: str, model: torch.nn.Module, advice: str = NO_SHARDED_SAVES) -> None:
    """Raise TypeError if a parameter or buffer of `model` is sharded over ranks.

    Args:
        what: the feature that does not support such models, which begins the message.
        advice: the last sentence of the message.
    """
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        refuse_sharded(f"{what}: {name!r} of the model", tensor, advice)
    for name, module in model.named_modules():
        if isinstance(module, (_fsdp1(), _fsdp2())):
            hint = f" {FULLY_SHARD}" if isinstance(module, _fsdp1()) else ""
            raise TypeError(
                f"{what}: the module {name!r} of the model is sharded over ranks: expected plain parameters, "
                f"got a {type(module).__name__}. {advice}{hint}"
            )


def gathers_weights(model: torch.nn.Module) -> bool:
    """Return whether a forward pass of `model` needs all ranks, because each holds a part of the weights."""
    return any(map(is_sharded, model.parameters())) or is_wrapped_by_fsdp(model)


def is_wrapped_by_fsdp(model: torch.nn.Module) -> bool:
    """Return whether FSDP1 or FSDP2 shards a module of `model`."""
    kinds = (_fsdp1(), _fsdp2())
    return any(isinstance(each, kinds) for each in model.modules())


def fsdp_modules(model: torch.nn.Module) -> list[Any]:
    """Return the modules of `model` to which FSDP2's `fully_shard` was applied."""
    fsdp2 = _fsdp2()
    return [module for module in model.modules() if isinstance(module, fsdp2)] if fsdp2 else []


def _sharded_tensor() -> Any:
    return _class("torch.distributed._shard.sharded_tensor", "ShardedTensor")


def _fsdp1() -> Any:
    return _class("torch.distributed.fsdp", "FullyShardedDataParallel")


def _fsdp2() -> Any:
    return _class("torch.distributed.fsdp", "FSDPModule")


def _class(module: str, name: str) -> Any:
    """Return a class of torch.distributed, or () if its module is not imported and so has no instances."""
    return getattr(sys.modules.get(module), name, ())
