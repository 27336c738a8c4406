"""Set numbers of param groups and attributes of hooks, for the command `set`: all of them or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from eventloop.steering.group_values import GroupChange, group_changes, group_names
from eventloop.steering.protocols import CommandError, FactorFollower, SteeredTrainer
from eventloop.steering.tunable import HookChange, hook_changes, hook_names
from eventloop.util.suggest import near


class _Change(Protocol):
    """One change of the command `set`: it is checked, made, and undone if a later change is refused."""

    label: str

    def check(self) -> None: ...
    def make(self) -> None: ...
    def restore(self) -> None: ...
    def result(self) -> dict[str, Any]: ...


def set_values(trainer: SteeredTrainer, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Set numbers: lr=1e-4, "lr*=0.5", gen.lr=1e-4, lr[1]=1e-4, early_stopping.patience=5.

    `lr*=0.5` multiplies the learning rate, and the later results of its schedule, by 0.5. `lr=1e-4` sets the
    current learning rate, and multiplies the later results of its schedule by the same ratio. Other options
    of the optimizer that are numbers can be set too, such as `weight_decay`; `momentum` is the first of
    Adam's betas, and `beta2` the second. A name sets all param groups of all optimizers that have it. `gen.`
    before the name chooses one of several optimizers, and `[1]` behind it a param group, by its index or its
    `name`. For a hook, write the hook's name and one of the attributes in its `tunable`.

    Args:
        trainer: the trainer.
        arguments: the numbers, or texts of them, by name; a name that ends with "*" multiplies.

    Returns:
        The old and the new value for each name, and the factor of the schedule if there is one. If there are
        several optimizers or groups, each has an entry of its own.

    Raises:
        CommandError: a name or a value is refused; then nothing was changed.
    """
    if not arguments:
        raise CommandError('set expects NAME=VALUE, such as lr=1e-4 or "lr*=0.5", got nothing')
    changes: list[_Change] = []
    for name, given in arguments.items():
        changes += _find(trainer, name, given)
    for change in changes:
        change.check()
    _make(changes)
    for hook in trainer.hooks:
        if isinstance(hook, FactorFollower):
            hook.follow_factors()
    for stepper in trainer.commands.steppers:
        stepper.follow_factors()
    return _results(changes)


def _results(changes: Sequence[_Change]) -> dict[str, Any]:
    """Return the results of changes by label, each a dict such as {"old": 0.1, "new": 0.05}."""
    results: dict[str, Any] = {}
    for change in changes:
        result = change.result()
        if change.label in results:  # one command has set it twice: the first old value counts
            result["old"] = results[change.label]["old"]
        results[change.label] = result
    return results


def _find(trainer: SteeredTrainer, name: str, given: Any) -> Sequence[GroupChange | HookChange]:
    """Return the changes for one argument of the command, such as "gen.lr" or "lr*".

    Raises:
        CommandError: nothing in this run has that name, or the value is refused.
    """
    plain = name.strip()
    multiplies = plain.endswith("*")
    plain = plain.removesuffix("*").strip()
    changes: Sequence[GroupChange | HookChange] = group_changes(trainer, plain, given, multiplies)
    if not changes:
        changes = hook_changes(trainer, plain, given, multiplies)
    if not changes:
        names = sorted({*group_names(trainer), *hook_names(trainer)})
        raise CommandError(
            f"set has nothing named {plain!r}{near(plain, names)}; what can be set: "
            f"{', '.join(names) or 'nothing in this run'}"
        )
    return changes


def _make(changes: Sequence[_Change]) -> None:
    """Make the changes in order; if one of them is refused, undo all of them."""
    try:
        for change in changes:
            change.make()
        for change in changes:
            if isinstance(change, GroupChange):
                change.check_step()
    except BaseException:
        for change in reversed(changes):
            change.restore()
        raise
