"""Read and write a value of an optimizer's param groups by its name, and check numbers for it.

The schedulers, the policy hooks and the resume use it. A value may be a float or a tensor; a tensor is filled
in place, because a compiled or captured step refers to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eventloop.optim.optimizers import named_optimizers
from eventloop.util.checks import number
from eventloop.util.suggest import suggest

Group = dict[str, Any]
Value = float | torch.Tensor


def groups_of(optimizer: Any) -> list[Group]:
    """Return the param groups of one optimizer, or of several by name, in order.

    For one optimizer it is the optimizer's own list, not a copy: schedules read it in each iteration, and
    must see groups that were added or loaded in the meantime.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer.param_groups
    return [group for each in named_optimizers(optimizer).values() for group in each.param_groups]


def check_has_value(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Check that `optimizer` is a PyTorch optimizer whose param groups have the value `name`."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    for group in optimizer.param_groups:
        if name not in group and not (name == "momentum" and "betas" in group):
            known = [key for key in group if key != "params"]
            raise ValueError(
                f"the param groups of {type(optimizer).__name__} have no {name!r}{suggest(name, known)}"
            )


def read_value(group: Group, name: str) -> Value:
    """Return a hyperparameter of a param group by its name; `momentum` is the first of Adam's `betas`."""
    value: Value = group["betas"][0] if _in_betas(group, name) else group[name]
    return value


def write_value(group: Group, name: str, value: Value) -> None:
    """Set a hyperparameter of a param group.

    A tensor is filled in place, because a compiled or captured step keeps a reference to it.
    """
    old = read_value(group, name)
    if isinstance(old, torch.Tensor):
        old.fill_(value)
    elif _in_betas(group, name):
        group["betas"] = (value, *group["betas"][1:])
    else:
        group[name] = value


def number_like(current: Any, value: Any) -> Any:
    """Return `value`; if `current` is a tensor, return a tensor like it that is filled with `value`."""
    return torch.full_like(current, value) if isinstance(current, torch.Tensor) else value


def initial_value(group: Group, name: str) -> float:
    """Return a group's value at the begin, and store it in the group as `initial_<name>` if it is missing.

    It is saved with the optimizer, so that a resumed run does not take a decayed value for the initial one.
    """
    key = f"initial_{name}"
    value = group[key] if key in group else read_value(group, name)
    if type(value) is not float:
        value = float(value)
    group[key] = value
    return value


def _in_betas(group: Group, name: str) -> bool:
    return name == "momentum" and name not in group


def per_group(what: str, value: object, groups: Sequence[Group], **bounds: float) -> float | list[float]:
    """Check that `value` is a finite number in a range, or a list with one for each param group; return it.

    Raises:
        TypeError, ValueError: the value is wrong; the message names `what`, the range or the number of
            groups, and the value.
    """
    if not isinstance(value, list | tuple):
        return number(what, value, **bounds)
    if len(value) != len(groups):
        raise ValueError(
            f"{what} must be one number, or one for each of the {len(groups)} param groups, got {value!r}"
        )
    return [number(f"each of {what}", each, **bounds) for each in value]
