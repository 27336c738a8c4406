"""What a run was set up with, in its checkpoints, and what of it a run that is resumed has changed.

PyTorch's optimizers and schedulers take their settings from the state that is loaded into them, so a learning rate
edited before a resume is lost without a word. Here the settings that the trainer was built with are compared with
those the checkpoint's run was built with: what a schedule has moved meanwhile is no change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler

from eventloop.optim.optimizers import named_optimizers
from eventloop.optim.param_groups import number_like
from eventloop.optim.windows import PROGRESS
from eventloop.resume.base_values import Bases, Edited, find_edited, rebase_group, scheduled, value_name
from eventloop.resume.fast_forward import (
    bring_anew,
    keys_of,
    own_schedulers,
    put_values,
    values_told,
    with_arguments,
    without_parameters,
)
from eventloop.resume.protocols import ResumableTrainer
from eventloop.resume.setting_changes import Change, Changed
from eventloop.util.checks import length_of

_OF_EVALUATIONS = ("val_interval", "val_begin", "dynamic_intervals")
_DERIVED = ".schedule_phases["  # of OneCycleLR, where something else says more
_ABSENT = object()


class Settings:
    """The settings of a trainer, as it was built."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self._trainer = trainer
        self._groups: dict[str, list[dict[str, Any]]] | None = None
        self._built: list[dict[str, Any]] = []  # states of the schedulers
        self._begun_with: dict[str, list[dict[str, Any]]] = {}  # all of the groups, of the optimizers by name
        self._edited: Bases = {}
        self._seen = _all_groups(trainer)  # before a hook's check, which may build schedulers
        self._constants: list[Any] = []
        self._options: dict[str, dict[str, Any]] = {}  # of hooks, by name
        self._loader: tuple[Any, dict[str, Any]] | None = None  # and what it was built with

    def note(self) -> None:
        """Remember what a schedule will move; called before anything is trained or loaded, only the first call does."""
        if self._groups is None:
            trainer = self._trainer
            self._begun_with = _all_groups(trainer)
            self._edited = find_edited(trainer, self._begun_with, self._seen)
            self._groups = {
                name: [_of_group(group, self._edited.get((name, i), {})) for i, group in enumerate(groups)]
                for name, groups in self._begun_with.items()
            }
            self._built = [deepcopy(_built_state(scheduler)) for scheduler in trainer.schedulers]
            self._constants = [_constants(state) for state in self._built]
            self._options = _options_of_hooks(trainer)
            if trainer.loader is not None:
                self._loader = trainer.loader, _of_loader(trainer.loader)

    def state_dict(self) -> dict[str, Any]:
        """What `compare` needs."""
        self.note()
        return {
            "optimizer": self._groups,
            "param_schedulers": self._constants,
            "run": self._of_run(),
            "hooks": _hooks(self._trainer),
            "hook_options": self._options,
        }

    def compare(self, meta: Mapping[str, Any]) -> list[Change]:
        """What differs from the run of a checkpoint; of one without settings only the length is compared. Of hooks
        those are named that only one of the two has."""
        self.note()
        saved = meta.get("settings", {})
        own_run, saved_run = self._of_run(), saved.get("run", {})
        changes = [*self._of_optimizers(saved.get("optimizer", {}))]
        changes += self._of_schedulers(saved.get("param_schedulers", []))
        changes += [
            Change(name, saved_run[name], own, _kind_of(name, saved_run[name], own))
            for name, own in own_run.items()
            if name in saved_run and not _same(saved_run[name], own)
        ]
        changes += self._of_hooks(saved.get("hook_options", {}))
        unit = "max_epochs" if self._trainer.by_epoch else "max_iters"
        if meta[unit] != (length := getattr(self._trainer, unit)):
            changes.append(Change(unit, meta[unit], length, "noted"))
        hooks = _hooks(self._trainer)
        if (former := saved.get("hooks", hooks)) != hooks:
            gone, new = (sorted({*a} - {*b}) for a, b in ((former, hooks), (hooks, former)))
            changes.append(Change("hooks", gone, new, "noted"))
        return changes

    def _of_run(self) -> dict[str, Any]:
        """Of a loader that was known before what it was built with: its length may change from pass to pass."""
        trainer, noted = self._trainer, self._loader
        found: dict[str, Any] = {}
        if trainer.loader is not None:  # that of a hand-written loop is known when its first epoch begins
            found = noted[1] if noted and noted[0] is trainer.loader else _of_loader(trainer.loader)
        return {
            **found,
            **trainer._schedule.settings(),
            "world_size": trainer.world_size,
            "autocast_dtype": _autocast_dtype(trainer),
            "model_dtypes": _dtypes(trainer),
        }

    def _of_optimizers(self, saved: Mapping[str, Any]) -> Iterator[Change]:
        for name, groups in (self._groups or {}).items():
            for number, (own, former) in enumerate(zip(groups, saved.get(name, []), strict=False)):
                of = f" of param group {number}" if len(groups) > 1 else ""
                for key in own:
                    if key in former and not _same(former[key], own[key]):
                        where = (name, number, key)
                        label = f"{name + ' ' if name else ''}{key}{of}"
                        yield Change(label, former[key], own[key], "loaded", where)

    def _of_schedulers(self, saved: list[Any]) -> Iterator[Change]:
        names = [type(scheduler).__name__ for scheduler in self._trainer.schedulers]
        for number, (name, own, former) in enumerate(zip(names, self._constants, saved, strict=False)):
            label = name if names.count(name) == 1 else f"schedulers[{number}] {name}"
            found = [*_differences(own, former, label)]
            found = [change for change in found if _DERIVED not in change.name] or found
            yield from (replace(change, scheduler=number) for change in found)

    def _of_hooks(self, saved: Mapping[str, Any]) -> Iterator[Change]:
        for name, options in self._options.items():
            former = saved.get(name, {})
            for key, own in options.items():
                if key in former and not _same(former[key], own):
                    yield Change(f"{name}.{key}", former[key], own, "given")

    def go_on(self, changed: Changed, changes: list[Change], meta: Mapping[str, Any]) -> None:
        """After the optimizers' state was loaded: put this trainer's settings back, or take the checkpoint's."""
        if changed == "apply":
            for change in changes:
                if change.group is not None:
                    self._apply(change, *change.group)
        elif "settings" in meta:
            saved = meta["settings"]
            for name, groups in (self._groups or {}).items():
                for own, former in zip(groups, saved["optimizer"].get(name, []), strict=False):
                    own |= {key: former[key] for key in own if key in former}
            self._constants = deepcopy(saved["param_schedulers"])

    def undo(self) -> Callable[[], None]:
        """What puts back the settings of now, after `go_on`."""
        groups, constants = deepcopy(self._groups), self._constants  # `go_on` replaces the latter

        def put_back() -> None:
            self._groups, self._constants = groups, constants

        return put_back

    def _apply(self, change: Change, name: str, number: int, key: str) -> None:
        group = named_optimizers(self._trainer.optimizer)[name].param_groups[number]
        if (initial := f"initial_{value_name(key)}") in self._begun_with[name][number]:
            base = change.own[0] if key == "betas" else change.own
            group[initial] = number_like(group.get(initial), base)
        group[key] = _moved(group[key], change.saved, change.own)

    def scheduler_state(self, number: int, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a scheduler that goes on where `saved` was, with the arguments it was built with."""
        return with_arguments(saved, deepcopy(self._built[number]))

    def _begun(self, changes: list[Change]) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
        """Copy the param groups and the schedulers' states as they were built; from an edited base where it is a change."""
        trainer = self._trainer
        begun = {name: [*map(without_parameters, groups)] for name, groups in self._begun_with.items()}
        built = deepcopy(self._built)
        for name, number, key in (change.group for change in changes if change.group is not None):
            value = value_name(key)
            if edited := self._edited.get((name, number), {}).get(value):
                numbers = own_schedulers(trainer, named_optimizers(trainer.optimizer)[name])
                moving = [i for i in numbers if getattr(trainer.schedulers[i], "param_name", "lr") == value]
                rebase_group(edited, value, begun[name][number], number, [built[i] for i in moving])
        return begun, built

    def scheduler_states(
        self, saved: list[dict[str, Any]], changes: list[Change], meta: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """The states of schedulers that go on with the arguments they were built with, and what there is to say of it.
        After `go_on`: the rates are what these arguments come to by now, where that is known; otherwise a schedule goes
        on from the rate that is there."""
        trainer = self._trainer
        begun_with, all_built = self._begun(changes)
        states = [with_arguments(*pair) for pair in zip(saved, all_built, strict=True)]
        listed = {change.group for change in changes}  # with its value, by `change_lines`
        lines: list[str] = []
        for name, optimizer in named_optimizers(trainer.optimizer).items():
            numbers = own_schedulers(trainer, optimizer)
            schedulers = [trainer.schedulers[number] for number in numbers]
            keys: set[str] = set().union(*map(keys_of, schedulers))
            if not any(_reschedules(change, name, numbers, keys) for change in changes):
                continue
            built, former = ([each[number] for number in numbers] for each in (all_built, saved))
            try:
                anew = bring_anew(schedulers, built, begun_with[name], former, meta)
            except Exception as error:  # of a function, or a part, of somebody's own
                lines.append(
                    f"where the schedules would be by now cannot be computed; the schedules continue from the current rate: {error!r}"
                )
                continue
            if anew is not None:
                lines += values_told(name, optimizer.param_groups, anew.groups, keys, listed)
                put_values(optimizer.param_groups, anew.groups, keys)
                for number, state in zip(numbers, anew.states, strict=True):
                    states[number] = state
        return states, lines


# --- gathering ---------------------------------------------------------------------------------------------


def _of_loader(loader: Any) -> dict[str, Any]:
    batch_size = getattr(loader, "batch_size", None)
    if batch_size is None:
        batch_size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return {
        "batch_size": batch_size,
        "loader_length": length_of(loader),
        "dataset_length": length_of(getattr(loader, "dataset", None)),
        "sampler": _samplers(loader),
    }


def _samplers(loader: Any) -> str | None:
    """The classes that decide the order, such as what `shuffle=True` makes."""
    found = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    names = [type(each).__name__ for each in found if each is not None and type(each) is not BatchSampler]
    return ", ".join(names) or None


def _options_of_hooks(trainer: ResumableTrainer) -> dict[str, dict[str, Any]]:
    """What each hook says of itself; an attribute `settings` of somebody's own hook is none of ours."""
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
    """The types of the model's parameters; loading would convert the checkpoint's without a word."""
    return ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trainer.model.parameters()}))


def _autocast_dtype(trainer: ResumableTrainer) -> str:
    dtype = getattr(trainer.autocast(), "fast_dtype", None)
    return "none" if dtype is None else str(dtype).removeprefix("torch.")


def _all_groups(trainer: ResumableTrainer) -> dict[str, list[dict[str, Any]]]:
    """Copy the param groups of each optimizer, without the parameters."""
    return {
        name: [without_parameters(group) for group in optimizer.param_groups]
        for name, optimizer in named_optimizers(trainer.optimizer).items()
    }


def _of_group(group: Mapping[str, Any], edited: Mapping[str, Edited]) -> dict[str, Any]:
    """Return the settings of a param group; a scheduled value is represented by its base."""
    found = {}
    bases = {
        name: edited[name].base if name in edited else group[f"initial_{name}"] for name in scheduled(group)
    }
    for key, value in group.items():
        if key.startswith("initial_"):
            continue
        value = bases.get(key, value)
        if key == "betas" and "momentum" in bases:
            value = (bases["momentum"], *value[1:])
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if (value := _constants(value)) is not _ABSENT:
            found[key] = value
    return found


def _built_state(scheduler: Any) -> dict[str, Any]:
    state: dict[str, Any] = getattr(scheduler, "built_state", scheduler.state_dict)()
    return state


def _constants(value: Any) -> Any:
    """The plain values of a nested state that are no progress."""
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
    """What one of two loaders does not say of itself may be the same."""
    return "noted" if name in _OF_EVALUATIONS or saved is None or own is None else "given"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b or (a != a and b != b))  # noqa: PLR0124 - NaN is NaN


def _differences(own: Any, saved: Any, name: str) -> Iterator[Change]:
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        for key in own:
            if key in saved:
                # as the argument was called, of which some schedulers keep a private copy
                inner = name if key == "scheduler" else f"{name}.{str(key).lstrip('_')}"
                yield from _differences(own[key], saved[key], inner)
    elif isinstance(own, list | tuple) and own and isinstance(own[0], Mapping):
        for number, (item, former) in enumerate(zip(own, saved, strict=False)):
            yield from _differences(item, former, f"{name}[{number}]")
    elif not _same(own, saved):
        yield Change(name, saved, own, "loaded")


# --- putting back ------------------------------------------------------------------------------------------


def _moved(current: Any, saved: Any, own: Any) -> Any:
    """The new value of a setting that was `saved`; what a schedule has made of it is kept in proportion."""
    if isinstance(current, torch.Tensor):
        return number_like(current, _moved(current.item(), saved, own))
    if isinstance(current, list | tuple) and len(current) == len(saved) == len(own):
        return type(current)(map(_moved, current, saved, own))
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (current, saved, own))
    if not numbers or current == saved or not saved:
        return own
    return current * (own / saved)


def _reschedules(change: Change, name: str, numbers: list[int], keys: set[str]) -> bool:
    """It is one of what these schedules do: an argument, of which some are in the groups (`max_lr`), or what they move."""
    if change.group is not None:
        key = change.group[2]
        return change.group[0] == name and (key in keys or key.partition("_")[2] in keys)
    return change.scheduler in numbers
