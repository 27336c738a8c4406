"""Compare what a model is, besides its weights, with a checkpoint's; `TrainerState` calls it on a resume."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from eventloop.resume.setting_changes import BUFFERS, FROZEN, Change, Choice


def type_changes(model: torch.nn.Module, weights: Mapping[str, Any]) -> list[Change]:
    """Return the change of the types of buffers, if weights have a buffer of another type than the model."""
    pairs = {
        name: (_type(weights[name]), _type(buffer))
        for name, buffer in model.named_buffers()
        if isinstance(weights.get(name), torch.Tensor) and weights[name].dtype != buffer.dtype
    }
    if not pairs:
        return []
    saved, own = ({name: types[side] for name, types in pairs.items()} for side in (0, 1))
    return [Change(BUFFERS, saved, own, "given")]


def frozen_parameters(model: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that do not train, as `requires_grad` is False."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def frozen_changes(
    model: torch.nn.Module, saved: Collection[str] | None, own: Collection[str]
) -> list[Change]:
    """Return the change of what was frozen when the run began; a program freezes more, or less, later.

    Args:
        saved: the frozen parameters when the checkpoint's run began; None if an earlier version has saved it.
        own: the frozen parameters when this trainer was built.
    """
    if saved is None or {*saved} == {*own}:
        return []
    names = [name for name, _ in model.named_parameters()]
    gone, new = ([n for n in names if n in a and n not in b] for a, b in ((saved, own), (own, saved)))
    return [Change(FROZEN, gone, new, "loaded")] if gone or new else []


def freeze(model: torch.nn.Module, meta: Mapping[str, Any], kept: Collection[str]) -> None:
    """Let the parameters train that trained when a checkpoint was saved, and freeze all others; cannot fail.

    Args:
        meta: the `meta` of the checkpoint.
        kept: the parameters that stay as they are.
    """
    if (frozen := meta.get("frozen")) is None:
        return
    for name, parameter in model.named_parameters():
        if name not in kept and (parameter.is_floating_point() or parameter.is_complex()):
            parameter.requires_grad_(name not in frozen)


def edited(changes: Iterable[Change], changed: Choice) -> set[str]:
    """Return the parameters that stay as this trainer has them: with "apply" those of `frozen_changes`."""
    found = [change for change in changes if change.name == FROZEN and changed == "apply"]
    return {name for change in found for name in (*change.saved, *change.own)}


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
