"""Record the settings of a run in its checkpoints, and find those that a resumed run has changed.

PyTorch's optimizers and schedulers load their settings with their state, so a learning rate that is edited
before a resume would be lost silently. `TrainerState` therefore compares the settings with which this trainer
was built and those in the checkpoint. A value that a schedule has moved does not count as a change.
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
_DERIVED = ".schedule_phases["  # of OneCycleLR, computed from its arguments
_ABSENT = object()


class Settings:
    """The settings with which a trainer was built, for its checkpoints and for the comparison on a resume."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self._trainer = trainer
        self._seen = _all_groups(trainer)  # before a hook's check, which may build schedulers
        self._begun: Begun | None = None
        self._groups: dict[str, list[dict[str, Any]]] = {}
        self._constants: list[Any] = []
        self._options: dict[str, dict[str, Any]] = {}  # of hooks, by name
        self._loader: tuple[Any, dict[str, Any]] | None = None  # the loader and its settings
        self._frozen: list[str] = []
        self.compared: set[str] = set()  # the names of the settings that `compare` has compared

    def record_begin(self) -> Begun:
        """Record the settings before a schedule moves them; only the first call counts, before any step."""
        if self._begun is not None:
            return self._begun
        trainer, groups = self._trainer, _all_groups(self._trainer)
        edited = find_edited(trainer, groups, self._seen)
        self._groups = {
            name: [_of_group(group, edited.get((name, i), {})) for i, group in enumerate(several)]
            for name, several in groups.items()
        }
        built = [deepcopy(getattr(s, "built_state", s.state_dict)()) for s in trainer.schedulers]
        self._constants = [_constants(state) for state in built]
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
        compared = self._of_optimizers(saved["optimizer"])
        compared += self._of_schedulers(saved["param_schedulers"])
        for name, own in self._of_run().items():
            former = saved["run"].get(name, own)
            # a value that one loader does not have is not refused
            noted = name in _OF_EVALUATIONS or former is None or own is None
            compared.append(Change(name, former, own, "noted" if noted else "given"))
        for name, options in self._options.items():
            others = saved["hook_options"].get(name, {})
            for key, own in options.items():
                compared.append(Change(f"{name}.{key}", others.get(key, own), own, "given"))
        self.compared = {each.name for each in compared}
        changes = [each for each in compared if each.saved != each.own and not _same(each.saved, each.own)]
        changes += self._frozen_changes(saved.get("frozen"))
        unit = "max_epochs" if self._trainer.by_epoch else "max_iters"
        if meta[unit] != (length := getattr(self._trainer, unit)):
            changes.append(Change(unit, meta[unit], length, "noted"))
        if (former := saved["hooks"]) != (hooks := _hooks(self._trainer)):
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

    def _of_optimizers(self, saved: Mapping[str, Any]) -> list[Change]:
        found = []
        for name, groups in self._groups.items():
            for number, (own, former) in enumerate(zip(groups, saved.get(name, []), strict=False)):
                of = f" of param group {number}" if len(groups) > 1 else ""
                for key in own:
                    label, value = f"{name + ' ' if name else ''}{key}{of}", former.get(key, own[key])
                    found.append(Change(label, value, own[key], "loaded", (name, number, key)))
        return found

    def _of_schedulers(self, saved: list[Any]) -> list[Change]:
        names = [type(scheduler).__name__ for scheduler in self._trainer.schedulers]
        changes: list[Change] = []
        for number, (name, own, former) in enumerate(zip(names, self._constants, saved, strict=False)):
            label = name if names.count(name) == 1 else f"schedulers[{number}] {name}"
            found = [*_leaves(own, former, label)]
            given = [each for each in found if _DERIVED not in each.name]
            found = found if all(_same(each.saved, each.own) for each in given) else given
            changes += [replace(change, scheduler=number) for change in found]
        return changes

    def _frozen_changes(self, saved: Collection[str] | None) -> list[Change]:
        """Return the change of what was frozen when the run began; a program freezes more, or less, later.

        Args:
            saved: the frozen parameters when the checkpoint's run began; None if an earlier version has saved
                it.
        """
        own = self._frozen
        if saved is None or {*saved} == {*own}:
            return []
        names = [name for name, _ in unwrap(self._trainer.model).named_parameters()]
        gone, new = ([n for n in names if n in a and n not in b] for a, b in ((saved, own), (own, saved)))
        return [Change(FROZEN, gone, new, "loaded")] if gone or new else []

    def record(self, meta: Mapping[str, Any]) -> None:
        """Replace the recorded settings by those in a checkpoint's `meta`, as the run continues with them."""
        saved = meta["settings"]
        for name, groups in self._groups.items():
            for own, former in zip(groups, saved["optimizer"].get(name, []), strict=False):
                own |= {key: former[key] for key in own if key in former}
        self._constants = deepcopy(saved["param_schedulers"])
        self._frozen = saved.get("frozen", self._frozen)


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
        settings = getattr(type(hook), "settings", None)
        if given := settings(hook).items() if callable(settings) else ():
            options = {key: _constants(value) for key, value in given}
            if plain := {key: value for key, value in options.items() if value is not _ABSENT}:
                found[hook.name] = plain
    return found


def _hooks(trainer: ResumableTrainer) -> list[str]:
    return sorted([hook.name for hook in trainer.hooks])


def _dtypes(trainer: ResumableTrainer) -> str:
    """Return the dtypes of the model's parameters as a text, such as "bfloat16, float32"."""
    return ", ".join(sorted(map(_name, {parameter.dtype for parameter in trainer.model.parameters()})))


def _autocast_dtype(trainer: ResumableTrainer) -> str:
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


def frozen_parameters(model: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that do not train, as `requires_grad` is False."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


# --- comparing ---------------------------------------------------------------------------------------------


def type_changes(model: torch.nn.Module, weights: Mapping[str, Any]) -> list[Change]:
    """Return the change of the types of buffers, if weights have a buffer of another type than the model."""
    pairs = {
        name: (_name(weights[name].dtype), _name(buffer.dtype))
        for name, buffer in model.named_buffers()
        if isinstance(weights.get(name), torch.Tensor) and weights[name].dtype != buffer.dtype
    }
    if not pairs:
        return []
    saved, own = ({name: types[side] for name, types in pairs.items()} for side in (0, 1))
    return [Change(BUFFERS, saved, own, "given")]


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
