"""Read and write a value of an optimizer's param groups by its name, and check numbers for it.

The schedulers, the policy hooks and the resume use it. A value may be a float or a tensor; a tensor is filled
in place, because a compiled or captured step refers to it.

The command `set` may multiply the values that a schedule computes by a factor. The factors are kept in the
param groups, so a checkpoint has them. They are removed while a schedule is stepped, and applied afterwards,
because most schedules compute the next value from the current one, in which no factor must be.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from eventloop.optim.optimizers import named_optimizers
from eventloop.util.checks import number
from eventloop.util.suggest import suggest

Group = dict[str, Any]
"""A param group of an optimizer: its parameters and its options by name."""
Value = float | torch.Tensor

FACTORS = "factors"
"""The key of the factors in a param group.

They are a dict from a value's name to a tuple: the factor, the value that the schedules computed, and their
product, which was written. While the factor is removed, the last two are None. Entries are replaced, never
changed, because a checkpoint may still be copied from them.
"""


def groups_of(optimizer: Any) -> list[Group]:
    """Return the param groups of an optimizer, or of all optimizers in a mapping, in order.

    For one optimizer this is the optimizer's own list, not a copy. A caller that keeps it finds groups that
    were added meanwhile.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer.param_groups
    return [group for each in named_optimizers(optimizer).values() for group in each.param_groups]


def without_parameters(group: Mapping[str, Any]) -> Group:
    """Return a copy of a param group without its parameters."""
    kept = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    return {k: v if type(v) in (float, int, bool) else deep_copied(v) for k, v in kept.items()}


def deep_copied(value: Any) -> Any:
    """Return a deep copy of a value, or the value itself if it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:  # an object of the user's, which no schedule reads
        return value


def own_schedulers(schedulers: Iterable[Any], optimizer: Any) -> list[int]:
    """Return the indices of the schedulers of one optimizer."""
    owners = [getattr(scheduler, "optimizer", None) for scheduler in schedulers]
    return [number for number, owner in enumerate(owners) if owner is optimizer]


def scheduled(group: Mapping[str, Any]) -> list[str]:
    """Return the names of the scheduled values of a param group: those with a key `initial_<name>`."""
    names = [key.removeprefix("initial_") for key in group if key.startswith("initial_")]
    return [name for name in names if name in group or (name == "momentum" and "betas" in group)]


def value_name(key: str) -> str:
    """Return the name of the scheduled value that a param group's key holds: "momentum" for `betas`."""
    return "momentum" if key == "betas" else key


def check_has_value(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raise TypeError or ValueError unless all param groups of a PyTorch optimizer have the value `name`."""
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
    """Return the value that a schedule begins with, and store it in the group as `initial_<name>`.

    If the group has it already, that is returned. The optimizer's state has it, so that a resumed run does
    not begin a schedule with a value that was lowered by then.
    """
    key = f"initial_{name}"
    value = group[key] if key in group else read_value(group, name)
    if type(value) is not float:
        value = float(value)
    group[key] = value
    return value


def set_factor(group: Group, name: str, factor: float, product: float) -> None:
    """Multiply the values that schedules compute by a factor, from now on.

    Args:
        group, name: the param group and the name of the value.
        factor: the product of the factors of all commands so far.
        product: the value that is written now.
    """
    given = given_by_schedules(group, name)
    write_value(group, name, product)
    _record(group, name, factor, given)


def given_by_schedules(group: Group, name: str) -> Value:
    """Return the value that the schedules have computed, without the factor.

    If other code has written the value since the factor was applied, return that divided by the factor.
    """
    current = read_value(group, name)
    factor, given, product = group.get(FACTORS, {}).get(name, (1.0, current, None))
    if product is None:
        return _copied(current)
    if isinstance(current, torch.Tensor):  # compared on its device, so that the host does not wait
        given, product = given.to(current.device), product.to(current.device)
        return torch.where(current == product, given, current / factor) if factor else given
    is_unchanged = current == product or not factor
    return given if is_unchanged else current / factor  # type: ignore[no-any-return]


def multiplied(group: Group, name: str, given: float) -> float:
    """Return the product of a value and its factor, and record both in the group, for a resume.

    Args:
        given: the value that a schedule has computed.
    """
    if (entry := group[FACTORS].get(name)) is None:
        return given
    product: float = given * entry[0]
    current = read_value(group, name)
    group[FACTORS] = {
        **group[FACTORS],
        name: (entry[0], number_like(current, given), number_like(current, product)),
    }
    return product


def has_factors(optimizers: Iterable[Any]) -> bool:
    """Return whether any param group of the optimizers has a factor."""
    return any(FACTORS in group for each in optimizers for group in each.param_groups)


def remove_factors(optimizers: Iterable[Any]) -> None:
    """Write the values without factors to the param groups, before the schedules make a step."""
    for group in (group for each in optimizers for group in each.param_groups):
        for name, (factor, _, product) in group.get(FACTORS, {}).items():
            if product is not None:
                write_value(group, name, given_by_schedules(group, name))
                group[FACTORS] = {**group[FACTORS], name: (factor, None, None)}


def apply_factors(optimizers: Iterable[Any]) -> None:
    """Write the products of values and factors to the param groups, after the schedules have made a step.

    Nothing is done for factors that `remove_factors` has not removed.
    """
    for group in (group for each in optimizers for group in each.param_groups):
        for name, (factor, _, product) in group.get(FACTORS, {}).items():
            if product is None:
                given = _copied(read_value(group, name))
                write_value(group, name, given * factor)
                _record(group, name, factor, given)


def record_last_rates(schedulers: Iterable[Any]) -> None:
    """Let `get_last_lr` of PyTorch's schedulers return the rates with factors."""
    for scheduler in schedulers:
        if isinstance(scheduler, LRScheduler):
            rates = [group["lr"] for group in scheduler.optimizer.param_groups]
            scheduler._last_lr = [_copied(rate) for rate in rates]


def _record(group: Group, name: str, factor: float, given: Value) -> None:
    """Store the entry of a factor in a group, whose value is the product now."""
    entry = (factor, given, _copied(read_value(group, name)))
    group[FACTORS] = {**group.get(FACTORS, {}), name: entry}


def _copied(value: Value) -> Value:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _in_betas(group: Group, name: str) -> bool:
    return name == "momentum" and name not in group


def per_group(what: str, value: object, groups: Sequence[Group], **bounds: float) -> float | list[float]:
    """Return an argument that is a finite number in a range, or a list with one for each param group.

    Args:
        what: the name of the argument in messages.
        value: the argument.
        groups: the param groups.
        bounds: the range, as for `eventloop.util.checks.number`.

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
