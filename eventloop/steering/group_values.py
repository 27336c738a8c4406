"""Set a number of an optimizer's param groups, such as the learning rate, for the command `set`.

If a schedule computes the value, the param group gets a factor, by which the results of the schedule are
multiplied (`optim.param_groups`), and no scheduler changes. Any other value is written to the param group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from eventloop.optim.optimizers import named_optimizers
from eventloop.optim.option_states import why_not_stepped
from eventloop.optim.param_groups import (
    FACTORS,
    Group,
    given_by_schedules,
    read_value,
    set_factor,
    write_value,
)
from eventloop.resume.fast_forward import keys_of
from eventloop.steering.protocols import CommandError, FactorFollower, SteeredTrainer
from eventloop.util.checks import number

_AT_LEAST_0 = ("lr", "weight_decay", "momentum", "momentum_decay", "eps", "alpha", "lr_decay", "lambd")
_BOUNDS: dict[str, dict[str, float]] = {
    **{name: {"least": 0} for name in _AT_LEAST_0},
    "dampening": {},
    "rho": {"least": 0, "most": 1},
    "beta2": {"least": 0, "below": 1},
}
"""The bounds of numbers in param groups, which the constructors of PyTorch's optimizers check too."""


class GroupChange:
    """A change of one number in one param group by a command.

    Args:
        label: the name of the number in the answer and in messages.
        optimizer, index: the optimizer, and the index of its param group.
        name: the key of the number in the param group. In a group with the pair `betas`, "momentum" is its
            first number and "beta2" its second.
        given: the argument of the command, a number or a text: the new value, or a factor for the old one.
        multiplies: whether `given` is a factor.
        scheduled: whether a schedule writes the number.

    Raises:
        CommandError: `given` is no finite number.
    """

    def __init__(
        self,
        label: str,
        optimizer: Any,
        index: int,
        name: str,
        given: Any,
        *,
        multiplies: bool,
        scheduled: bool,
    ) -> None:
        self.label = label
        self._optimizer, self._index, self._name = optimizer, index, name
        self._multiplies = multiplies
        self._given = _number_of(label, given, multiplies=multiplies)
        self._scheduled = scheduled or name in self._group.get(FACTORS, {})
        self._old = _read(self._group, name)
        self._undo: Callable[[], None] | None = None
        self._factor: float | None = None  # of the schedule, once `make` has set it

    @property
    def _group(self) -> Group:
        group: Group = self._optimizer.param_groups[self._index]
        return group

    def check(self) -> None:
        """Refuse a value that the optimizer's constructor would refuse, or that no factor can give.

        Raises:
            CommandError: the value is out of bounds, or its schedule gives 0 now.
        """
        self._new_value()

    def make(self) -> None:
        """Write the value, or set the factor of its schedule."""
        group, name = self._group, self._name
        value, self._factor = self._new_value()
        self._undo = partial(_restore, group, name, _copied(_value(group, name)), group.get(FACTORS))
        if self._factor is not None:
            set_factor(group, name, self._factor, value)
        else:
            _write(group, name, value)

    def check_step(self) -> None:
        """Refuse a value that was 0 if the optimizer's next step would fail, as it lacks a state for it.

        Raises:
            CommandError: the optimizer cannot make a step with the new value.
        """
        if self._old == 0 and self._name != "lr":
            reason = why_not_stepped(self._optimizer, self._index)
            if reason is not None:
                raise CommandError(f"{self.label} was 0 and cannot be set within a run: {reason}")

    def restore(self) -> None:
        """Restore the old value, if `make` has changed it."""
        if self._undo is not None:
            self._undo()

    def result(self) -> dict[str, Any]:
        """Return the result of the command: the old and the new value, and the factor of a schedule."""
        result: dict[str, Any] = {"old": self._old, "new": _read(self._group, self._name)}
        if self._factor is not None:
            return {**result, "factor": self._factor}
        if f"initial_{self._name}" in self._group:
            result["note"] = f"a scheduler that the trainer does not step may write {self._name} again"
        return result

    def _new_value(self) -> tuple[float, float | None]:
        """Return the new value, and the new factor of its schedule, or None if it has no schedule.

        Raises:
            CommandError: the value is out of bounds, or the schedule gives 0 now.
        """
        group, name, given = self._group, self._name, self._given
        if not self._scheduled:
            return self._checked(_read(group, name) * given if self._multiplies else given), None
        old_factor = group.get(FACTORS, {}).get(name, (1.0,))[0]
        value_of_schedule = float(given_by_schedules(group, name))
        if self._multiplies:
            factor = old_factor * given
            return self._checked(value_of_schedule * factor), factor
        value = self._checked(given)
        if value_of_schedule == 0:
            raise CommandError(
                f"{self.label} is scheduled, and its schedule gives 0 now, to which {given:g} has no "
                f'proportion: multiply the schedule by a factor ("{self.label}*=0.5"), or set the value when '
                "the schedule is above 0"
            )
        return value, value / value_of_schedule

    def _checked(self, value: float) -> float:
        """Return a value as the param group holds it; refuse one that is out of bounds."""
        group, name = self._group, self._name
        is_first_beta = name == "momentum" and name not in group  # it has the bounds of the second one
        try:
            return _in_bounds(self.label, "beta2" if is_first_beta else name, value, _value(group, name))
        except (TypeError, ValueError) as error:
            raise CommandError(str(error)) from None


def group_changes(trainer: SteeredTrainer, name: str, given: Any, multiplies: bool) -> list[GroupChange]:
    """Return a change for each param group that a name such as "critic.lr[0]" means.

    Args:
        name: [optimizer.]option[group]: without an optimizer or a group, all of them are changed.
        given, multiplies: see `GroupChange`.

    Returns:
        The changes; an empty list if the name means no option of an optimizer.

    Raises:
        CommandError: the option is no number, there is no such group, or the value is no finite number.
    """
    without_group, group_name = _split_group(name)
    optimizer_name, _, option = without_group.rpartition(".")
    optimizers = named_optimizers(trainer.optimizer)
    if optimizer_name:
        optimizers = {key: each for key, each in optimizers.items() if key == optimizer_name}
    changes = []
    for key, optimizer in optimizers.items():
        groups = optimizer.param_groups
        scheduled = _is_scheduled(trainer, optimizer, option)
        for index, group in enumerate(groups):
            is_chosen = group_name in (None, str(index), group.get("name"))
            if is_chosen and _has(optimizer, group, option):
                suffix = f"[{index}]" if len(groups) > 1 else ""
                label = f"{_prefix(key)}{option}{suffix}"
                change = GroupChange(
                    label, optimizer, index, option, given, multiplies=multiplies, scheduled=scheduled
                )
                changes.append(change)
    if not changes:
        _refuse_option(optimizers, without_group, option, group_name)
    return changes


def group_names(trainer: SteeredTrainer) -> Iterator[str]:
    """Yield the names of the numbers in param groups that the command `set` can change."""
    optimizers = named_optimizers(trainer.optimizer)
    for key, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for option in (*group, "momentum", "beta2"):
                if _has(optimizer, group, option):
                    yield f"{_prefix(key)}{option}"


def _refuse_option(
    optimizers: dict[str, Any], without_group: str, option: str, group_name: str | None
) -> None:
    """Refuse an option of the optimizers that is no number, or a param group that does not exist.

    Args:
        optimizers: the optimizers that the name of the option means.
        without_group: the name of the option without the group in brackets.
    """
    for optimizer in optimizers.values():
        groups = optimizer.param_groups
        if group_name is not None and any(_has(optimizer, group, option) for group in groups):
            names = [group["name"] for group in groups if "name" in group]
            raise CommandError(
                f"{without_group}[{group_name}]: expected the index of a param group, 0 to {len(groups) - 1}"
                f"{f', or one of the names {names}' if names else ''}, got {group_name!r}"
            )
        if option == "betas" and "betas" in groups[0]:
            raise CommandError("betas are two numbers: set momentum for the first and beta2 for the second")
        if option in getattr(optimizer, "defaults", {}):
            raise CommandError(
                f"{without_group} is an option of {type(optimizer).__name__} that is no number: its value is "
                f"{groups[0].get(option)!r}, which cannot be set within a run"
            )


def _prefix(optimizer_name: str) -> str:
    return f"{optimizer_name}." if optimizer_name else ""


def _split_group(name: str) -> tuple[str, str | None]:
    """Split "lr[0]" into "lr" and "0"; return None in place of a group that the name does not have."""
    if name.endswith("]") and "[" in name:
        without_group, _, group = name.removesuffix("]").partition("[")
        return without_group, group
    return name, None


def _has(optimizer: Any, group: Group, option: str) -> bool:
    """Return whether an option is a number in a param group, and an option of the optimizer."""
    if option == "beta2":
        return len(group.get("betas", ())) == 2
    if option == "momentum" and option not in group:
        return "betas" in group
    value = group.get(option)
    is_option = option in getattr(optimizer, "defaults", {}) or option in _BOUNDS
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_tensor = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_option and (is_number or is_tensor)


def _is_scheduled(trainer: SteeredTrainer, optimizer: Any, option: str) -> bool:
    """Return whether a scheduler that the trainer or another engine steps, or a hook, writes an option."""
    if any(getattr(hook, "param_name", None) == option for hook in trainer.hooks):
        return True
    if any(stepper.steps(optimizer, option) for stepper in trainer.commands.steppers):
        return True
    if not any(isinstance(hook, FactorFollower) for hook in trainer.hooks):
        return False  # no hook steps the schedulers, so a factor would not be applied
    for scheduler in trainer.schedulers:
        groups = getattr(getattr(scheduler, "optimizer", optimizer), "param_groups", None)
        if groups is optimizer.param_groups and option in keys_of(scheduler):
            return True
    return False


def _in_bounds(label: str, name: str, value: float, current: Any) -> float:
    """Check the bounds of a value, and return it; as an int if the current value is one (`max_iter`).

    Raises:
        TypeError, ValueError: the value is out of bounds, or not a whole number.
    """
    if name in _BOUNDS or not isinstance(current, int):
        return number(label, value, **_BOUNDS.get(name, {}))
    if value != int(number(label, value, least=1)):
        raise TypeError(f"{label} must be an int, got {value!r}")
    return int(value)


def _number_of(label: str, given: Any, *, multiplies: bool) -> float:
    """Return a number, or a text of one, as a finite number; refuse other values and negative factors."""
    try:
        value = float(given) if isinstance(given, str) else given
        return number(label, value, least=0 if multiplies else None)
    except (TypeError, ValueError):
        expected = "* expects a factor of at least 0" if multiplies else " expects a finite number"
        raise CommandError(f"{label}{expected}, got {given!r}") from None


def _value(group: Group, name: str) -> Any:
    """Return a value of a param group as the group has it: a number or a tensor."""
    return group["betas"][1] if name == "beta2" else read_value(group, name)


def _read(group: Group, name: str) -> Any:
    """Return a value of a param group as a number; wait for the device if it is in a tensor."""
    value = _value(group, name)
    return value.item() if isinstance(value, torch.Tensor) else value


def _write(group: Group, name: str, value: Any) -> None:
    """Write a value to a param group, in place if it is in a tensor."""
    if name != "beta2":
        write_value(group, name, value)
    elif isinstance(group["betas"][1], torch.Tensor):
        group["betas"][1].fill_(value)
    else:
        group["betas"] = (group["betas"][0], value)


def _restore(group: Group, name: str, value: Any, factors: Any) -> None:
    """Write a value and the factors of schedules to a param group; None removes the factors."""
    _write(group, name, value)
    group.pop(FACTORS, None)
    if factors is not None:
        group[FACTORS] = factors


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
