"""Record the settings of a run in its checkpoints, and find those that a resumed run has changed.

PyTorch's optimizers and schedulers load their settings with their state, so a learning rate that is edited
before a resume would be lost silently. A resume therefore compares the settings with which this trainer was
built with those in the checkpoint. A value that a schedule has changed does not count as a change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from msgspec.structs import replace
from torch.utils.data import BatchSampler

from eventloop.checkpoint.weights import unwrap
from eventloop.data.limits import Limits
from eventloop.optim.optimizers import named_optimizers
from eventloop.optim.param_groups import FACTORS, Group, scheduled, without_parameters
from eventloop.optim.windows import PROGRESS
from eventloop.resume.apply import Begun, Edited, find_edited
from eventloop.resume.protocols import ResumableTrainer
from eventloop.resume.setting_changes import BUFFERS, FROZEN, Change
from eventloop.util.checks import length_of

_OF_EVALUATIONS = ("val_interval", "val_begin", "dynamic_intervals")
"""The settings of validations, which a resumed run may change without permission."""
_DERIVED = ".schedule_phases["
"""A part of the names of those values in OneCycleLR's state that it computes from its arguments."""
_ABSENT = object()
"""Stands for a value that cannot be compared, such as a function."""


class Settings:
    """The settings with which a trainer was built, for its checkpoints and for the comparison on a resume."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self._trainer = trainer
        self._seen = _all_groups(trainer)  # now: a hook's check may build schedulers, which change values
        self._begun: Begun | None = None
        self._groups: dict[str, list[dict[str, Any]]] = {}  # the settings of each param group, by optimizer
        # the arguments of each scheduler: its state without the values that each step changes
        self._arguments: list[Any] = []
        self._options: dict[str, dict[str, Any]] = {}  # the settings of hooks, by the hook's name
        self._loader: tuple[Any, dict[str, Any]] | None = None  # the loader and its settings
        self._frozen: list[str] = []  # the names of the parameters that do not train
        self.compared: set[str] = set()  # the names of the settings that `compare` has compared

    def record_begin(self) -> Begun:
        """Record the settings before the first step, which may change them; later calls record nothing.

        Returns:
            What the trainer was built with, as the first call has found it.
        """
        if self._begun is not None:
            return self._begun
        trainer, groups = self._trainer, _all_groups(self._trainer)
        edited = find_edited(trainer, groups, self._seen)
        self._groups = {
            name: [_of_group(group, edited.get((name, i), {})) for i, group in enumerate(of_optimizer)]
            for name, of_optimizer in groups.items()
        }
        built = [deepcopy(getattr(s, "built_state", s.state_dict)()) for s in trainer.schedulers]
        self._arguments = [_constants(state) for state in built]
        self._options = _options_of_hooks(trainer)
        self._frozen = frozen_parameters(unwrap(trainer.model))
        if trainer.loader is not None:
            self._loader = trainer.loader, _of_loader(trainer.loader, trainer.limits)
        self._begun = Begun(groups, built, edited)
        return self._begun

    def state_dict(self) -> dict[str, Any]:
        """Return the settings for a checkpoint's `meta`, from which `compare` of a later run reads them."""
        self.record_begin()
        return {
            "optimizer": self._groups,
            "param_schedulers": self._arguments,
            "run": self._of_run(),
            "hooks": _hooks(self._trainer),
            "hook_options": self._options,
            "frozen": self._frozen,
        }

    def compare(self, meta: Mapping[str, Any]) -> list[Change]:
        """Return the settings that differ between this run and the run that saved a checkpoint.

        The length of the run, and hooks that only one of the two runs has, are among them.

        Args:
            meta: the `meta` of the checkpoint.
        """
        self.record_begin()
        saved = meta["settings"]
        compared = self._of_optimizers(saved["optimizer"])
        compared += self._of_schedulers(saved["param_schedulers"])
        for name, own in self._of_run().items():
            former = saved["run"].get(name, own)
            # None stands for a value that a loader does not have, such as a length: this is not refused
            may_differ = name in _OF_EVALUATIONS or former is None or own is None
            compared.append(Change(name, former, own, "noted" if may_differ else "given"))
        for name, options in self._options.items():
            saved_options = saved["hook_options"].get(name, {})
            for key, own in options.items():
                compared.append(Change(f"{name}.{key}", saved_options.get(key, own), own, "given"))
        self.compared = {each.name for each in compared}
        changes = [each for each in compared if each.saved != each.own and not _same(each.saved, each.own)]
        changes += self._frozen_changes(saved.get("frozen"))
        unit = "max_epochs" if self._trainer.by_epoch else "max_iters"
        if meta[unit] != (length := getattr(self._trainer, unit)):
            changes.append(Change(unit, meta[unit], length, "noted"))
        if (former := saved["hooks"]) != (hooks := _hooks(self._trainer)):
            gone, new = sorted({*former} - {*hooks}), sorted({*hooks} - {*former})
            changes.append(Change("hooks", gone, new, "noted"))
        return changes

    def _of_run(self) -> dict[str, Any]:
        """Return the settings of the run, its loader and its validations, by name.

        The settings of a loader are those that `record_begin` stored, because the length of a loader may
        change from pass to pass.
        """
        trainer, recorded = self._trainer, self._loader
        of_loader: dict[str, Any] = {}
        if trainer.loader is not None:  # the loader of a hand-written loop is known at its first epoch
            same = recorded is not None and recorded[0] is trainer.loader
            of_loader = recorded[1] if recorded and same else _of_loader(trainer.loader, trainer.limits)
        return {
            **of_loader,
            **trainer.schedule.settings(),
            "unit": trainer.counting.unit,
            "world_size": trainer.world_size,
            "data_ranks": trainer.data_ranks,
            "autocast_dtype": _autocast_dtype(trainer),
            "model_dtypes": _dtypes(trainer),
        }

    def _of_optimizers(self, saved: Mapping[str, Any]) -> list[Change]:
        """Return the saved value and this run's own of each setting of the param groups.

        Equal values are included, because `compare` records the names of all settings that it has compared.
        The kind of the changes is "loaded": the run can continue with either value.

        Args:
            saved: the settings of the param groups in the checkpoint, by the optimizer's name.
        """
        pairs = []
        for name, groups in self._groups.items():
            for number, (own, saved_group) in enumerate(zip(groups, saved.get(name, []), strict=False)):
                of = f" of param group {number}" if len(groups) > 1 else ""
                for key in own:
                    label = f"{name + ' ' if name else ''}{key}{of}"
                    saved_value = saved_group.get(key, own[key])
                    pairs.append(Change(label, saved_value, own[key], "loaded", (name, number, key)))
        return pairs

    def _of_schedulers(self, saved: list[Any]) -> list[Change]:
        """Return the saved value and this run's own of each argument of the schedulers, also equal ones.

        Values that OneCycleLR computes from its arguments are left out if an argument differs, which says
        enough.

        Args:
            saved: the arguments of each scheduler in the checkpoint.
        """
        names = [type(scheduler).__name__ for scheduler in self._trainer.schedulers]
        changes: list[Change] = []
        for number, (name, own, former) in enumerate(zip(names, self._arguments, saved, strict=False)):
            label = name if names.count(name) == 1 else f"schedulers[{number}] {name}"
            values = [*_leaves(own, former, label)]
            arguments = [each for each in values if _DERIVED not in each.name]
            values = values if all(_same(each.saved, each.own) for each in arguments) else arguments
            changes += [replace(change, scheduler=number) for change in values]
        return changes

    def _frozen_changes(self, saved: Collection[str] | None) -> list[Change]:
        """Return a list with the change of the parameters that were frozen at the begin; [] if there is none.

        Parameters that the program freezes or trains later, within the run, are not compared.

        Args:
            saved: the parameters that were frozen when the checkpoint's run began; None if an earlier version
                of eventloop has saved the checkpoint.
        """
        own = self._frozen
        if saved is None or {*saved} == {*own}:
            return []
        names = [name for name, _ in unwrap(self._trainer.model).named_parameters()]
        only_saved = [name for name in names if name in saved and name not in own]
        only_own = [name for name in names if name in own and name not in saved]
        return [Change(FROZEN, only_saved, only_own, "loaded")] if only_saved or only_own else []

    def record(self, meta: Mapping[str, Any]) -> None:
        """Replace the recorded settings by those in a checkpoint's `meta`, as the run continues with them."""
        saved = meta["settings"]
        for name, groups in self._groups.items():
            for own, former in zip(groups, saved["optimizer"].get(name, []), strict=False):
                own |= {key: former[key] for key in own if key in former}
        self._arguments = deepcopy(saved["param_schedulers"])
        self._frozen = saved.get("frozen", self._frozen)


# --- gathering ---------------------------------------------------------------------------------------------


def _of_loader(loader: Any, limits: Limits) -> dict[str, Any]:
    """Return the settings of a loader by name; None stands for a length or size that it does not have."""
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
    """Return the class names of a loader's samplers, which decide the order; None without any.

    A plain `BatchSampler` does not change the order, and is left out.
    """
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    names = [type(each).__name__ for each in samplers if each is not None and type(each) is not BatchSampler]
    return ", ".join(names) or None


def _options_of_hooks(trainer: ResumableTrainer) -> dict[str, dict[str, Any]]:
    """Return each hook's settings that are plain values, by the hook's name and the setting's.

    Only hooks with a method `settings` have any.
    """
    by_hook = {}
    for hook in trainer.hooks:
        settings = getattr(type(hook), "settings", None)
        if given := settings(hook).items() if callable(settings) else ():
            options = {key: _constants(value) for key, value in given}
            if plain := {key: value for key, value in options.items() if value is not _ABSENT}:
                by_hook[hook.name] = plain
    return by_hook


def _hooks(trainer: ResumableTrainer) -> list[str]:
    return sorted([hook.name for hook in trainer.hooks])


def _dtypes(trainer: ResumableTrainer) -> str:
    """Return the dtypes of the model's parameters as a text, such as "bfloat16, float32"."""
    return ", ".join(sorted(map(_name, {parameter.dtype for parameter in trainer.model.parameters()})))


def _autocast_dtype(trainer: ResumableTrainer) -> str:
    """Return the dtype of the trainer's autocast, such as "bfloat16"; "none" without autocast."""
    dtype = getattr(trainer.autocast(), "fast_dtype", None)
    return "none" if dtype is None else _name(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _all_groups(trainer: ResumableTrainer) -> dict[str, list[Group]]:
    """Return copies of the param groups of each optimizer, without the parameters, by its name."""
    return {
        name: [without_parameters(group) for group in optimizer.param_groups]
        for name, optimizer in named_optimizers(trainer.optimizer).items()
    }


def _of_group(group: Mapping[str, Any], edited: Mapping[str, Edited]) -> dict[str, Any]:
    """Return the settings of a param group, with the base value in place of one that a schedule writes.

    Args:
        group: the param group.
        edited: the base values that were edited after the schedules were built, by name.
    """
    settings = {}
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
            settings[key] = value
    return settings


def _constants(value: Any) -> Any:
    """Return the plain values in a setting or a scheduler's state, without those that each step changes.

    Return `_ABSENT` for a value of another type, such as a function.
    """
    if isinstance(value, Counter):  # the milestones of MultiStepLR
        return sorted(value.elements())
    if isinstance(value, Mapping):
        constants = {key: _constants(item) for key, item in value.items() if key not in PROGRESS}
        return {key: item for key, item in constants.items() if item is not _ABSENT}
    if isinstance(value, list | tuple):
        items = [_constants(item) for item in value]
        return _ABSENT if any(item is _ABSENT for item in items) else type(value)(items)
    return value if value is None or isinstance(value, bool | int | float | str) else _ABSENT


def frozen_parameters(model: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that do not train, as `requires_grad` is False."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


# --- comparing ---------------------------------------------------------------------------------------------


def type_changes(model: torch.nn.Module, weights: Mapping[str, Any]) -> list[Change]:
    """Return a list with the change of the buffers' dtypes; [] if the model and the weights have the same."""
    buffers = {
        name: buffer
        for name, buffer in model.named_buffers()
        if isinstance(weights.get(name), torch.Tensor) and weights[name].dtype != buffer.dtype
    }
    if not buffers:
        return []
    saved = {name: _name(weights[name].dtype) for name in buffers}
    own = {name: _name(buffer.dtype) for name, buffer in buffers.items()}
    return [Change(BUFFERS, saved, own, "given")]


def _same(a: Any, b: Any) -> bool:
    """Return whether two settings are equal; a list equals a tuple of the same items, and NaN equals NaN."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b or (a != a and b != b))  # noqa: PLR0124 - NaN is NaN


def _leaves(own: Any, saved: Any, name: str) -> Iterator[Change]:
    """Yield the saved and the own value of each entry of nested settings that both have.

    Args:
        own, saved: the settings of this trainer and those of the checkpoint.
        name: the name of the settings, with which the names of their entries begin.
    """
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
