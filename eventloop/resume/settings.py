"""Record the settings of a run in its checkpoints, and find those that a resumed run has changed.

PyTorch's optimizers and schedulers load their settings with their state, so a learning rate that is edited
before a resume would be lost silently. `TrainerState` therefore compares the settings with which this trainer
was built and those in the checkpoint. A value that a schedule has moved does not count as a change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler

from eventloop.checkpoint.weights import unwrap
from eventloop.data.limits import Limits
from eventloop.optim.optimizers import each_optimizer, named_optimizers
from eventloop.optim.param_groups import FACTORS, apply_factors, number_like, read_value, remove_factors
from eventloop.optim.windows import PROGRESS
from eventloop.resume.base_values import (
    Bases,
    Edited,
    find_edited,
    moved,
    rebase_group,
    scheduled,
    value_name,
)
from eventloop.resume.fast_forward import (
    changed_values,
    fast_forward,
    follows_metric,
    keys_of,
    new_groups,
    own_schedulers,
    put_values,
    restore_former,
    with_arguments,
    without_parameters,
)
from eventloop.resume.model_settings import frozen_changes, frozen_parameters
from eventloop.resume.protocols import ResumableTrainer
from eventloop.resume.setting_changes import Change
from eventloop.util.checks import length_of

_OF_EVALUATIONS = ("val_interval", "val_begin", "dynamic_intervals")
_DERIVED = ".schedule_phases["  # of OneCycleLR, computed from its arguments
_ABSENT = object()


class Settings:
    """The settings with which a trainer was built, for its checkpoints and for the comparison on a resume."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self._trainer = trainer
        self._groups: dict[str, list[dict[str, Any]]] | None = None
        self.built: list[dict[str, Any]] = []  # states of the schedulers
        self._begun_with: dict[str, list[dict[str, Any]]] = {}  # the param groups, by optimizer name
        self._edited: Bases = {}
        self._seen = _all_groups(trainer)  # before a hook's check, which may build schedulers
        self._constants: list[Any] = []
        self._options: dict[str, dict[str, Any]] = {}  # of hooks, by name
        self._loader: tuple[Any, dict[str, Any]] | None = None  # the loader and its settings
        self._frozen: list[str] = []
        self.compared: set[str] = set()  # the names of the settings that `compare` has compared

    def record_begin(self) -> None:
        """Record the settings before a schedule moves them; only the first call counts, before any step."""
        if self._groups is None:
            trainer = self._trainer
            self._begun_with = _all_groups(trainer)
            self._edited = find_edited(trainer, self._begun_with, self._seen)
            self._groups = {
                name: [_of_group(group, self._edited.get((name, i), {})) for i, group in enumerate(groups)]
                for name, groups in self._begun_with.items()
            }
            self.built = [deepcopy(getattr(s, "built_state", s.state_dict)()) for s in trainer.schedulers]
            self._constants = [_constants(state) for state in self.built]
            self._options = _options_of_hooks(trainer)
            self._frozen = frozen_parameters(unwrap(trainer.model))
            if trainer.loader is not None:
                self._loader = trainer.loader, _of_loader(trainer.loader, trainer.limits)

    def state_dict(self) -> dict[str, Any]:
        """Return the settings for a checkpoint's `meta`, from which `compare` of a later run reads them."""
        self.record_begin()
        return {
            "optimizer": self._groups,
            "param_schedulers": self._constants,
            "run": self._of_run(),
            "hooks": _hooks(self._trainer),
            "hook_options": self._options,
            "frozen": self._frozen,
        }

    def compare(self, meta: Mapping[str, Any]) -> list[Change]:
        """Return the settings in which this run differs from that of a checkpoint with this `meta`.

        Hooks that only one of the two runs has are included.
        """
        self.record_begin()
        saved = meta["settings"]
        compared = [*self._of_optimizers(saved["optimizer"])]
        compared += self._of_schedulers(saved["param_schedulers"])
        for name, own in self._of_run().items():
            former = saved["run"].get(name, own)
            compared.append(Change(name, former, own, _kind_of(name, former, own)))
        compared += self._of_hooks(saved["hook_options"])
        self.compared = {each.name for each in compared}
        changes = [each for each in compared if not _same(each.saved, each.own)]
        changes += frozen_changes(unwrap(self._trainer.model), saved.get("frozen"), self._frozen)
        unit = "max_epochs" if self._trainer.by_epoch else "max_iters"
        if meta[unit] != (length := getattr(self._trainer, unit)):
            changes.append(Change(unit, meta[unit], length, "noted"))
        hooks = _hooks(self._trainer)
        if (former := saved["hooks"]) != hooks:
            gone, new = (sorted({*a} - {*b}) for a, b in ((former, hooks), (hooks, former)))
            changes.append(Change("hooks", gone, new, "noted"))
        return changes

    def _of_run(self) -> dict[str, Any]:
        """Return the settings of the run, its loader and its validations, by name.

        The settings of a loader are those that `record_begin` stored, because the length of a loader may
        change from pass to pass.
        """
        trainer, noted = self._trainer, self._loader
        found: dict[str, Any] = {}
        if trainer.loader is not None:  # the loader of a hand-written loop is known at its first epoch
            same = noted is not None and noted[0] is trainer.loader
            found = noted[1] if noted and same else _of_loader(trainer.loader, trainer.limits)
        return {
            **found,
            **trainer.schedule.settings(),
            "unit": trainer.counting.unit,
            "world_size": trainer.world_size,
            "data_ranks": trainer.data_ranks,
            "autocast_dtype": _autocast_dtype(trainer),
            "model_dtypes": _dtypes(trainer),
        }

    def _of_optimizers(self, saved: Mapping[str, Any]) -> Iterator[Change]:
        for name, groups in (self._groups or {}).items():
            for number, (own, former) in enumerate(zip(groups, saved.get(name, []), strict=False)):
                of = f" of param group {number}" if len(groups) > 1 else ""
                for key in own:
                    label, value = f"{name + ' ' if name else ''}{key}{of}", former.get(key, own[key])
                    yield Change(label, value, own[key], "loaded", (name, number, key))

    def _of_schedulers(self, saved: list[Any]) -> Iterator[Change]:
        names = [type(scheduler).__name__ for scheduler in self._trainer.schedulers]
        for number, (name, own, former) in enumerate(zip(names, self._constants, saved, strict=False)):
            label = name if names.count(name) == 1 else f"schedulers[{number}] {name}"
            found = [*_leaves(own, former, label)]
            given = [each for each in found if _DERIVED not in each.name]
            found = found if all(_same(each.saved, each.own) for each in given) else given
            yield from (replace(change, scheduler=number) for change in found)

    def _of_hooks(self, saved: Mapping[str, Any]) -> Iterator[Change]:
        for name, options in self._options.items():
            former = saved.get(name, {})
            for key, own in options.items():
                yield Change(f"{name}.{key}", former.get(key, own), own, "given")

    def apply_groups(self, changes: list[Change]) -> None:
        """Overwrite the loaded values of changed settings in the param groups by those of this trainer.

        The factors that commands have set are removed; `fast_forward` applies them again.
        """
        remove_factors(each_optimizer(self._trainer.optimizer))
        for change in changes:
            if change.group is not None:
                self._apply(change, *change.group)

    def record(self, meta: Mapping[str, Any]) -> None:
        """Replace the recorded settings by those in a checkpoint's `meta`, as the run continues with them."""
        saved = meta["settings"]
        for name, groups in (self._groups or {}).items():
            for own, former in zip(groups, saved["optimizer"].get(name, []), strict=False):
                own |= {key: former[key] for key in own if key in former}
        self._constants = deepcopy(saved["param_schedulers"])
        self._frozen = saved.get("frozen", self._frozen)

    def _apply(self, change: Change, name: str, number: int, key: str) -> None:
        group = named_optimizers(self._trainer.optimizer)[name].param_groups[number]
        if (initial := f"initial_{value_name(key)}") in self._begun_with[name][number]:
            base = change.own[0] if key == "betas" else change.own
            group[initial] = number_like(group.get(initial), base)
        group[key] = moved(group[key], change.saved, change.own)

    def scheduler_states(self, saved: Sequence[Any], changes: Sequence[Change]) -> list[dict[str, Any]]:
        """Return the schedulers' states of a checkpoint, with their arguments replaced by this trainer's.

        Args:
            saved: the states in the checkpoint.
            changes: the result of `compare`; edited base values among them are written into the states.
        """
        return [with_arguments(*pair) for pair in zip(saved, self._begun(changes)[1], strict=True)]

    def _begun(
        self, changes: Sequence[Change]
    ) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
        """Return copies of the param groups and the schedulers' states from when this trainer was built.

        If a base value, such as a learning rate, was edited after that, the copies have the edited value.

        Args:
            changes: the result of `compare`, in which the edited base values are found.
        """
        trainer = self._trainer
        begun = {name: [*map(without_parameters, groups)] for name, groups in self._begun_with.items()}
        built = deepcopy(self.built)
        for name, number, key in (change.group for change in changes if change.group is not None):
            value = value_name(key)
            if edited := self._edited.get((name, number), {}).get(value):
                numbers = own_schedulers(trainer, named_optimizers(trainer.optimizer)[name])
                moving = [i for i in numbers if getattr(trainer.schedulers[i], "param_name", "lr") == value]
                rebase_group(edited, value, begun[name][number], number, [built[i] for i in moving])
        return begun, built

    def fast_forward(
        self, checkpoint: Mapping[str, Any], states: Sequence[Mapping[str, Any]], changes: list[Change]
    ) -> list[str]:
        """Bring changed schedules and new param groups to the checkpoint's step, and return lines to log.

        A schedule whose values cannot be computed continues from the current rate.

        Args:
            states: the result of `scheduler_states`, which the schedulers have loaded.
            changes: the result of `compare`.
        """
        trainer, lines = self._trainer, list[str]()
        begun_with, built = self._begun(changes)
        listed = {change.group for change in changes}  # `change_lines` logs these with their values
        for name, optimizer in named_optimizers(trainer.optimizer).items():
            numbers = own_schedulers(trainer, optimizer)
            own = [trainer.schedulers[i] for i in numbers]
            keys: set[str] = set().union(*map(keys_of, own))
            reschedules = any(change.reschedules(name, numbers, keys) for change in changes)
            new = new_groups(checkpoint["meta"], name)
            if not own or not (reschedules or new) or any(map(follows_metric, own)):
                continue
            groups, loaded = optimizer.param_groups, [states[number] for number in numbers]
            former = [without_parameters(group) for group in groups]
            try:
                put_values(groups, begun_with[name], keys)
                saved = [checkpoint["param_schedulers"][number] for number in numbers]
                fast_forward(own, [built[number] for number in numbers], saved, checkpoint["meta"])
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
        apply_factors(each_optimizer(trainer.optimizer))
        return [*lines, *(self._factor_lines() if changes else ())]

    def _factor_lines(self) -> Iterator[str]:
        """Yield a log line for each factor of a command, which multiplies a changed schedule too."""
        for name, optimizer in named_optimizers(self._trainer.optimizer).items():
            for number, group in enumerate(optimizer.param_groups):
                for key, (factor, *_) in group.get(FACTORS, {}).items():
                    yield (
                        f"{name + ' ' if name else ''}{key} of param group {number} is what its schedules "
                        f"give times {factor:g}, as commands have set: {float(read_value(group, key)):g}"
                    )


# --- gathering ---------------------------------------------------------------------------------------------


def _of_loader(loader: Any, limits: Limits) -> dict[str, Any]:
    batch_size = getattr(loader, "batch_size", None)
    if batch_size is None:
        batch_size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return {
        "batch_size": batch_size,
        "loader_length": limits.length("train", loader),
        "dataset_length": length_of(getattr(loader, "dataset", None)),
        "sampler": _samplers(loader),
    }


def _samplers(loader: Any) -> str | None:
    """Return the class names of a loader's samplers, which decide the order; None without any."""
    found = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    names = [type(each).__name__ for each in found if each is not None and type(each) is not BatchSampler]
    return ", ".join(names) or None


def _options_of_hooks(trainer: ResumableTrainer) -> dict[str, dict[str, Any]]:
    """Return each hook's settings that are plain values, by the hook's name and the setting's.

    Only hooks with a method `settings` have any.
    """
    found = {}
    for hook in trainer.hooks:
        if callable(settings := getattr(type(hook), "settings", None)):
            options = {key: _constants(value) for key, value in settings(hook).items()}
            if plain := {key: value for key, value in options.items() if value is not _ABSENT}:
                found[hook.name] = plain
    return found


def _hooks(trainer: ResumableTrainer) -> list[str]:
    return sorted(hook.name for hook in trainer.hooks)


def _dtypes(trainer: ResumableTrainer) -> str:
    """Return the dtypes of the model's parameters as a text, such as "bfloat16, float32"."""
    return ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trainer.model.parameters()}))


def _autocast_dtype(trainer: ResumableTrainer) -> str:
    dtype = getattr(trainer.autocast(), "fast_dtype", None)
    return "none" if dtype is None else str(dtype).removeprefix("torch.")


def _all_groups(trainer: ResumableTrainer) -> dict[str, list[dict[str, Any]]]:
    """Return copies of the param groups of each optimizer, without the parameters, by its name."""
    return {
        name: [without_parameters(group) for group in optimizer.param_groups]
        for name, optimizer in named_optimizers(trainer.optimizer).items()
    }


def _of_group(group: Mapping[str, Any], edited: Mapping[str, Edited]) -> dict[str, Any]:
    """Return the settings of a param group, in which base values, `edited` or not, replace scheduled ones."""
    found = {}
    bases = {
        name: edited[name].base if name in edited else group[f"initial_{name}"] for name in scheduled(group)
    }
    for key, value in group.items():
        if key.startswith("initial_") or key == FACTORS:
            continue
        value = bases.get(key, value)
        if key == "betas" and "momentum" in bases:
            value = (bases["momentum"], *value[1:])
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if (value := _constants(value)) is not _ABSENT:
            found[key] = value
    return found


def _constants(value: Any) -> Any:
    """Return the plain values of a scheduler's state, without those that each step changes.

    Return `_ABSENT` for a value of another type, such as a function.
    """
    if isinstance(value, Counter):  # the milestones of MultiStepLR
        return sorted(value.elements())
    if isinstance(value, Mapping):
        found = {key: _constants(item) for key, item in value.items() if key not in PROGRESS}
        return {key: item for key, item in found.items() if item is not _ABSENT}
    if isinstance(value, list | tuple):
        items = [_constants(item) for item in value]
        return _ABSENT if any(item is _ABSENT for item in items) else type(value)(items)
    return value if value is None or isinstance(value, bool | int | float | str) else _ABSENT


# --- comparing ---------------------------------------------------------------------------------------------


def _kind_of(name: str, saved: Any, own: Any) -> Literal["given", "noted"]:
    """Return "noted" for a setting of validations, or a value that one loader does not have; else "given"."""
    return "noted" if name in _OF_EVALUATIONS or saved is None or own is None else "given"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b or (a != a and b != b))  # noqa: PLR0124 - NaN is NaN


def _leaves(own: Any, saved: Any, name: str) -> Iterator[Change]:
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        for key in own:
            if key in saved:
                # under the argument's name, which some schedulers keep in a private attribute
                inner = name if key == "scheduler" else f"{name}.{str(key).lstrip('_')}"
                yield from _leaves(own[key], saved[key], inner)
    elif isinstance(own, list | tuple) and own and isinstance(own[0], Mapping):
        for number, (item, former) in enumerate(zip(own, saved, strict=False)):
            yield from _leaves(item, former, f"{name}[{number}]")
    else:
        yield Change(name, saved, own, "loaded")
