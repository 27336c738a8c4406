"""Find learning rates, and other values of param groups, that were edited after their schedules were built.

A warm-up of factor 0.1 writes a tenth of the rate into the param group when it is built, and multiplies the
current rate by 10 over its course. It would therefore multiply a rate that is edited in between, too. So
`settings` takes an edited value as the new base value, from which the schedules begin again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from eventloop.optim.optimizers import named_optimizers
from eventloop.optim.param_groups import Group, number_like, read_value, write_value
from eventloop.optim.windows import Window
from eventloop.resume.fast_forward import own_schedulers
from eventloop.resume.protocols import ResumableTrainer

Groups = Mapping[str, Sequence[dict[str, Any]]]
"""The param groups of each optimizer, by the optimizer's name."""


class Edited(NamedTuple):
    """An edited base value, and the factor with which its schedules begin.

    Args:
        base: the base value after the edit.
        first_factor: the first value that the schedules write, divided by the base; 1.0 without a warm-up.
    """

    base: float
    first_factor: float


Bases = dict[tuple[str, int], dict[str, Edited]]
"""The edited values, by the optimizer's name and the index of the param group, then by the value's name."""


def find_edited(trainer: ResumableTrainer, groups: Groups, seen: Groups) -> Bases:
    """Find the base values that were edited after the schedulers of a trainer were built.

    Args:
        groups: the param groups of each optimizer now, before anything is trained or loaded.
        seen: the param groups of each optimizer when the trainer was built.
    """
    found: Bases = {}
    for optimizer_name, optimizer in named_optimizers(trainer.optimizer).items():
        schedulers = [trainer.schedulers[i] for i in own_schedulers(trainer, optimizer)]
        pairs = zip(groups[optimizer_name], seen[optimizer_name], strict=False)
        for index, (group, former) in enumerate(pairs):
            edits = {name: edited_base(group, index, name, schedulers, former) for name in scheduled(group)}
            found[optimizer_name, index] = {name: edit for name, edit in edits.items() if edit}
    return found


def scheduled(group: Mapping[str, Any]) -> list[str]:
    """Return the names of the scheduled values of a param group: those with a key `initial_<name>`."""
    names = [key.removeprefix("initial_") for key in group if key.startswith("initial_")]
    return [name for name in names if name in group or (name == "momentum" and "betas" in group)]


def value_name(key: str) -> str:
    """Return the name of the scheduled value that a param group's key holds: "momentum" for `betas`."""
    return "momentum" if key == "betas" else key


def edited_base(group: Group, index: int, name: str, schedulers: Sequence[Any], seen: Group) -> Edited | None:
    """Return the base value that was edited after the schedulers were built, or None.

    If `initial_<name>` was edited, the base is its new value, else the new value of `<name>`.

    Args:
        group, index: the param group, and its index in the optimizer.
        name: the scheduled value, such as "lr"; the group has its `initial_<name>`.
        schedulers: the schedulers of the optimizer.
        seen: the param group when the trainer was built. It is compared if a hook schedules the value and no
            scheduler does.
    """
    initial, value = float(group[f"initial_{name}"]), float(read_value(group, name))
    written = [pairs[index] for each in schedulers if index < len(pairs := _written(each, name))]
    written = written or [(initial, float(read_value(seen, name)))]
    if any(_same(value, left) and _same(initial, base) for base, left in written):
        return None
    # The last schedule that moved the value includes the effect of the others.
    base, left = next((pair for pair in reversed(written) if not _same(*pair)), written[-1])
    first_factor = left / base if base else 1.0
    return Edited(initial if not _same(initial, base) else value, first_factor)


def rebase_group(
    edited: Edited, name: str, group: Group, index: int, states: Sequence[dict[str, Any]]
) -> None:
    """Write an edited base value into a param group and the states of its schedulers.

    The group and the states are then as if the optimizer had been built with that value.

    Args:
        name: the scheduled value, such as "lr".
        index: the index of the group in the optimizer.
        states: the schedulers' states to change.
    """
    group[f"initial_{name}"] = number_like(group[f"initial_{name}"], edited.base)
    write_value(group, name, edited.base * edited.first_factor)
    for state in states:
        _rebase(state, index, edited.base)


def moved(current: Any, saved: Any, own: Any) -> Any:
    """Return `own`, multiplied by the factor by which a schedule has moved `saved` to `current`."""
    if isinstance(current, torch.Tensor):
        return number_like(current, moved(current.item(), saved, own))
    if isinstance(current, list | tuple) and len(current) == len(saved) == len(own):
        return type(current)(map(moved, current, saved, own))
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (current, saved, own))
    if not numbers or current == saved or not saved:
        return own
    return current * (own / saved)


def _rebase(state: dict[str, Any], index: int, base: float) -> None:
    if base_lrs := state.get("base_lrs"):
        state["base_lrs"] = [*base_lrs[:index], number_like(base_lrs[index], base), *base_lrs[index + 1 :]]
    if inner := state.get("scheduler"):  # A Window stores its inner base minus the floor.
        floor = state["floor"]
        _rebase(inner, index, base - (floor if isinstance(floor, int | float) else floor[index]))
    for part in state.get("_schedulers", ()):
        _rebase(part, index, base)


def _written(scheduler: Any, name: str) -> list[tuple[float, float]]:
    """Return for each param group the base value of a scheduler, and the value that it wrote last.

    Return an empty list if the scheduler does not schedule `name`, or does not store its last values.
    """
    if isinstance(scheduler, Window):
        return scheduler.written() if scheduler.param_name == name else []
    last = getattr(scheduler, "_last_lr", None)
    if name != "lr" or not last:
        return []
    bases = next(_base_lrs(scheduler), last)  # ReduceLROnPlateau has no base_lrs; use its last rate.
    return [(float(base), float(left)) for base, left in zip(bases, last, strict=False)]


def _base_lrs(scheduler: Any) -> Iterator[list[Any]]:
    if hasattr(scheduler, "base_lrs"):
        yield scheduler.base_lrs
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _base_lrs(part)


def _same(a: float, b: float) -> bool:
    """Return whether two values are equal in the precision of float32, as a rate in a tensor has it."""
    return math.isclose(a, b, rel_tol=1e-6)
