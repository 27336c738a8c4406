"""Continue with this trainer's settings where a checkpoint has others: `resume(changed="apply")`.

`restoring` uses an `Applying` once the states of the optimizers are loaded. A changed value is written into
the param groups, and a changed schedule begins again, and is stepped to the step of the checkpoint.

A learning rate may also have been edited after its schedules were built. The base value of a schedule is the
rate that the optimizer was built with. A warm-up of factor 0.1 writes a tenth of it into the param group at
once, and multiplies the current rate by 10 over its course. If the script sets the rate in between, the
warm-up would multiply this new rate by 10. So the edited rate becomes the base value, from which the
schedules begin again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from eventloop.optim.optimizers import named_optimizers
from eventloop.optim.option_states import why_not_stepped
from eventloop.optim.param_groups import (
    FACTORS,
    Group,
    apply_factors,
    number_like,
    own_schedulers,
    read_value,
    remove_factors,
    scheduled,
    value_name,
    without_parameters,
    write_value,
)
from eventloop.optim.windows import Window
from eventloop.resume.fast_forward import (
    changed_values,
    fast_forward,
    follows_metric,
    keys_of,
    put_values,
    restore_former,
    with_arguments,
)
from eventloop.resume.protocols import ResumableTrainer
from eventloop.resume.setting_changes import Change
from eventloop.util.errors import CheckpointError

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


class Begun(NamedTuple):
    """What a trainer was built with, before a schedule has moved anything.

    Args:
        groups: the param groups of each optimizer, without the parameters, by its name.
        schedulers: the states of the schedulers.
        edited: the values that were edited after the schedulers were built.
    """

    groups: Groups
    schedulers: Sequence[Mapping[str, Any]]
    edited: Bases


class Applying:
    """Load param groups and schedules of a checkpoint with those settings of this trainer that differ.

    Args:
        trainer: the trainer that resumes.
        begun: the param groups and schedules with which the trainer was built.
        changes: the changed settings, for which the run continues with this trainer's values; () for none.
    """

    def __init__(self, trainer: ResumableTrainer, begun: Begun, changes: Sequence[Change] = ()) -> None:
        self._trainer, self._changes = trainer, changes
        self._optimizers = named_optimizers(trainer.optimizer)
        # copies, into which edited base values are written
        self._groups = {name: [*map(without_parameters, groups)] for name, groups in begun.groups.items()}
        self._built: list[dict[str, Any]] = [deepcopy(dict(state)) for state in begun.schedulers]
        self._begun = begun
        self._rebase()

    def _rebase(self) -> None:
        """Write the edited base values into the copies of the param groups and schedulers' states."""
        schedulers = self._trainer.schedulers
        for name, number, key in (change.group for change in self._changes if change.group is not None):
            value = value_name(key)
            if edited := self._begun.edited.get((name, number), {}).get(value):
                numbers = own_schedulers(schedulers, self._optimizers[name])
                writing = [i for i in numbers if getattr(schedulers[i], "param_name", "lr") == value]
                states = [self._built[i] for i in writing]
                rebase_group(edited, value, self._groups[name][number], number, states)

    def write_groups(self, source: object) -> None:
        """Overwrite the loaded values of changed settings in the param groups by those of this trainer.

        The factors that commands have set are removed; `fast_forward` applies them again.

        Args:
            source: the path of the checkpoint, for the error.

        Raises:
            CheckpointError: an option that is on in this trainer and off in the checkpoint, such as momentum,
                needs a state that the checkpoint does not have.
        """
        remove_factors(self._optimizers.values())
        for change in self._changes:
            if change.group is not None:
                self._write(change, *change.group)
        for change in self._changes:  # once all are written, as an option may depend on others
            if change.group is not None and change.own and not change.saved:
                name, number, key = change.group
                if (missing := why_not_stepped(self._optimizers[name], number)) is not None:
                    raise CheckpointError(
                        f"{source} cannot be resumed from with {change}: {missing}, "
                        f'which the checkpoint does not have: changed="keep" goes on with '
                        f"{key}={change.saved!r}, and load_checkpoint(path) loads the weights alone"
                    )

    def _write(self, change: Change, name: str, number: int, key: str) -> None:
        """Write this trainer's value into the param group `number`, and its base value if it is scheduled."""
        group = self._optimizers[name].param_groups[number]
        if (initial := f"initial_{value_name(key)}") in self._begun.groups[name][number]:
            base = change.own[0] if key == "betas" else change.own
            group[initial] = number_like(group.get(initial), base)
        group[key] = moved(group[key], change.saved, change.own)

    def scheduler_states(self, saved: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the schedulers' states of a checkpoint, with their arguments replaced by this trainer's."""
        return [with_arguments(*pair) for pair in zip(saved, deepcopy(self._built), strict=True)]

    def fast_forward(
        self, checkpoint: Mapping[str, Any], states: Sequence[Any], new_groups: Mapping[str, Sequence[int]]
    ) -> list[str]:
        """Step changed schedules, and those of new param groups, to the step of the checkpoint.

        A schedule whose values cannot be computed continues from the current rate.

        Args:
            checkpoint: the contents of the checkpoint.
            states: the states that the schedulers have loaded.
            new_groups: the indices of the param groups that the checkpoint does not have, by optimizer.

        Returns:
            The lines to log.
        """
        trainer, lines = self._trainer, list[str]()
        listed = {change.group for change in self._changes}  # `change_lines` logs these with their values
        for name, optimizer in self._optimizers.items():
            numbers = own_schedulers(trainer.schedulers, optimizer)
            own = [trainer.schedulers[i] for i in numbers]
            keys: set[str] = set().union(*map(keys_of, own))
            reschedules = any(change.reschedules(name, numbers, keys) for change in self._changes)
            new = new_groups.get(name, ())
            if not own or not (reschedules or new) or any(map(follows_metric, own)):
                continue
            groups, loaded = optimizer.param_groups, [states[number] for number in numbers]
            former = [without_parameters(group) for group in groups]  # as the checkpoint has them
            try:
                put_values(groups, self._groups[name], keys)
                saved = [checkpoint["param_schedulers"][number] for number in numbers]
                fast_forward(own, [self._built[number] for number in numbers], saved, checkpoint["meta"])
                if not reschedules:
                    restore_former(own, loaded, groups, former, new)
                lines += changed_values(name, former, groups, keys, listed, new)
            except Exception as error:  # of a function or a scheduler that the user wrote
                put_values(groups, former, keys)
                for scheduler, state in zip(own, loaded, strict=True):
                    scheduler.load_state_dict(state)
                lines.append(
                    "the present values of the schedules cannot be computed; the schedules continue from the "
                    f"current rate: {error!r}"
                )
        apply_factors(self._optimizers.values())
        return [*lines, *(self._factor_lines() if self._changes else ())]

    def _factor_lines(self) -> Iterator[str]:
        """Yield a log line for each factor that a command has set, as it multiplies the new schedule too."""
        for name, optimizer in self._optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                for key, (factor, *_) in group.get(FACTORS, {}).items():
                    yield (
                        f"{name + ' ' if name else ''}{key} of param group {number} is what its schedules "
                        f"give times {factor:g}, as commands have set: {float(read_value(group, key)):g}"
                    )


def scheduled_now(trainer: ResumableTrainer, name: str, number: int, key: str) -> str:
    """Return the end of a log line about a changed base value: its scheduled value at this step.

    Return "" if the value has no schedule.

    Args:
        name, number, key: the optimizer's name, the index of the param group, and the key in it.
    """
    optimizer = named_optimizers(trainer.optimizer)[name]
    group, at = optimizer.param_groups[number], f"at iteration {trainer.iter} (epoch {trainer.epoch})"
    if any(key in keys_of(trainer.schedulers[i]) for i in own_schedulers(trainer.schedulers, optimizer)):
        return f" as the base: its schedules make it {_shown(group[key])} {at}"
    if (value := value_name(key)) in scheduled(group):
        hooks = [hook.name for hook in trainer.hooks if getattr(hook, "param_name", None) == value]
        return f" as the base: {' and '.join(hooks) or 'its schedule'} sets the value from it {at}"
    return ""


def _shown(value: Any) -> str:
    """Return a number, or a pair such as Adam's betas, as a text with six digits."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_shown, value))})"
    return f"{float(value):.6g}"


def find_edited(trainer: ResumableTrainer, groups: Groups, seen: Groups) -> Bases:
    """Find the base values that were edited after the schedulers of a trainer were built.

    Args:
        groups: the param groups of each optimizer now, before anything is trained or loaded.
        seen: the param groups of each optimizer when the trainer was built.
    """
    bases: Bases = {}
    for optimizer_name, optimizer in named_optimizers(trainer.optimizer).items():
        schedulers = [trainer.schedulers[i] for i in own_schedulers(trainer.schedulers, optimizer)]
        pairs = zip(groups[optimizer_name], seen[optimizer_name], strict=False)
        for index, (group, former) in enumerate(pairs):
            edits = {name: edited_base(group, index, name, schedulers, former) for name in scheduled(group)}
            bases[optimizer_name, index] = {name: edit for name, edit in edits.items() if edit}
    return bases


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
    # for each schedule the base value from which it began, and the value that it wrote when it was built
    written = [pairs[index] for each in schedulers if index < len(pairs := _written(each, name))]
    written = written or [(initial, float(read_value(seen, name)))]
    if any(_same(value, last) and _same(initial, base) for base, last in written):
        return None
    # the last schedule that changed the value: its result includes the effect of those before it
    base, last = next((pair for pair in reversed(written) if not _same(*pair)), written[-1])
    first_factor = last / base if base else 1.0
    return Edited(initial if not _same(initial, base) else value, first_factor)


def rebase_group(
    edited: Edited, name: str, group: Group, index: int, states: Sequence[dict[str, Any]]
) -> None:
    """Write an edited base value into a param group and the states of its schedulers.

    The group and the states are then as if the optimizer had been built with that value.

    Args:
        edited: the edited base value.
        name: the scheduled value, such as "lr".
        group, index: the param group, and its index in the optimizer.
        states: the schedulers' states to change.
    """
    group[f"initial_{name}"] = number_like(group[f"initial_{name}"], edited.base)
    write_value(group, name, edited.base * edited.first_factor)
    for state in states:
        _rebase(state, index, edited.base)


def moved(current: Any, saved: Any, own: Any) -> Any:
    """Return this trainer's value as a schedule would have changed it since the begin of the run.

    The schedule has changed the checkpoint's base value to the current one by a factor, with which the own
    base value is multiplied, too.

    Args:
        current: the value in the param group, as the checkpoint's schedule left it.
        saved, own: the base values of the checkpoint and of this trainer.
    """
    if isinstance(current, torch.Tensor):
        return number_like(current, moved(current.item(), saved, own))
    if isinstance(current, list | tuple) and len(current) == len(saved) == len(own):
        return type(current)(map(moved, current, saved, own))
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (current, saved, own))
    if not numbers or current == saved or not saved:
        return own
    return current * (own / saved)


def _rebase(state: dict[str, Any], index: int, base: float) -> None:
    """Write the base value of a param group into a scheduler's state, and into those of inner schedulers."""
    if base_lrs := state.get("base_lrs"):
        state["base_lrs"] = [*base_lrs[:index], number_like(base_lrs[index], base), *base_lrs[index + 1 :]]
    if inner := state.get("scheduler"):  # of a Window, which subtracts its floor from the base value
        floor = state["floor"]
        _rebase(inner, index, base - (floor if isinstance(floor, int | float) else floor[index]))
    for part in state.get("_schedulers", ()):
        _rebase(part, index, base)


def _written(scheduler: Any, name: str) -> list[tuple[float, float]]:
    """Return a pair for each param group: the base value of a scheduler, and the value that it wrote last.

    Return [] if the scheduler does not schedule `name`, or does not store its last values.
    """
    if isinstance(scheduler, Window):
        return scheduler.written() if scheduler.param_name == name else []
    last = getattr(scheduler, "_last_lr", None)
    if name != "lr" or not last:
        return []
    bases = next(_base_lrs(scheduler), last)  # ReduceLROnPlateau has no `base_lrs`: it begins from its rate
    return [(float(base), float(rate)) for base, rate in zip(bases, last, strict=False)]


def _base_lrs(scheduler: Any) -> Iterator[list[Any]]:
    """Yield the base rates of a scheduler and of the schedulers in it, each a list by param group."""
    if hasattr(scheduler, "base_lrs"):
        yield scheduler.base_lrs
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _base_lrs(part)


def _same(a: float, b: float) -> bool:
    """Return whether two values are equal in the precision of float32, in which a tensor holds a rate."""
    return math.isclose(a, b, rel_tol=1e-6)
