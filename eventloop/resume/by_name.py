"""Arrange the optimizers' and schedulers' states of a checkpoint by name, as a trainer has its parameters.

PyTorch's states know parameters, param groups and schedulers by their place alone. Loaded as they are, each
parameter would continue with the moments of another one if the order differs. So `CheckpointState` first
arranges everything that goes by place, and only then compares and loads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from eventloop.checkpoint.weights import OWN, unwrap
from eventloop.optim.optimizer_states import check_optimizers, loads_as_torch
from eventloop.optim.optimizers import named_optimizers
from eventloop.optim.param_groups import own_schedulers, without_parameters
from eventloop.optim.parameter_names import alike_without_a_name, labels_of, parameter_names
from eventloop.resume.fast_forward import by_group
from eventloop.resume.protocols import ResumableTrainer
from eventloop.resume.setting_changes import Change
from eventloop.state.containers import copied
from eventloop.state.schema import refusing
from eventloop.util.errors import CheckpointError

_ADVICE = "or call load_checkpoint(path), which loads the weights alone"


class ByName:
    """A checkpoint's states, arranged as the trainer's own parameters, param groups and schedulers are.

    Args:
        trainer: the trainer that resumes.
        checkpoint: the contents of the checkpoint, which stay unchanged.
        built: the states of the trainer's schedulers from when it was built.
        source: the path of the checkpoint, for messages.
    """

    def __init__(
        self,
        trainer: ResumableTrainer,
        checkpoint: Mapping[str, Any],
        built: Sequence[Mapping[str, Any]],
        source: object,
    ) -> None:
        self._trainer, self._built, self._source = trainer, built, source
        meta = checkpoint["meta"]
        self._settings = {**meta["settings"]}
        self.checkpoint = {**checkpoint, "meta": {**meta, "settings": self._settings}}
        self.changes: list[Change] = []
        """The parameters that only the checkpoint's optimizers or only the trainer's have."""
        self.lines: list[str] = []
        """The lines to log if the run continues all the same."""
        self.new_groups: dict[str, list[int]] = {}
        """The indices of the param groups that the checkpoint does not have, by optimizer."""

    def arrange(self) -> None:
        """Arrange all states; parameters that only one side has are listed in `changes`.

        Raises:
            CheckpointError: optimizers, schedulers or param groups are others, and no arrangement fits.
        """
        check_optimizers(self._trainer.optimizer, self.checkpoint, self._source)
        self._arrange_schedulers()
        saved = self.checkpoint["meta"].get("parameters", {})  # empty if an earlier version has saved it
        trainer = self._trainer
        own = parameter_names(unwrap(trainer.model), trainer.loss_fn, trainer.optimizer)
        for name, optimizer in named_optimizers(self._trainer.optimizer).items():
            if name in saved:
                with refusing(f"{self._source}: the state of the {_called(name)} cannot be arranged by name"):
                    self._arrange_optimizer(name, optimizer, own[name], saved[name])

    @property
    def names(self) -> list[str]:
        """Return the names that `changes` may have."""
        return [_of_parameters(name) for name in named_optimizers(self._trainer.optimizer)]

    # --- optimizers ----------------------------------------------------------------------------------------

    def _arrange_optimizer(self, name: str, optimizer: Any, own: list[str], saved: list[str]) -> None:
        state = self.checkpoint["optimizer"][name] if name else self.checkpoint["optimizer"]
        if alike := alike_without_a_name(optimizer, own):
            self.lines.append(
                f"{alike} parameters of the {_called(name)} that are not the model's have no names, and "
                "shapes that others have: their states are taken in their order. Give the optimizer (name, "
                "parameter) pairs, as of named_parameters(), or put the parameters into the model"
            )
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        ours = labels_of(own, sizes, self._source)
        theirs = labels_of(saved, (len(group["params"]) for group in state["param_groups"]), self._source)
        if ours == theirs:
            return
        match = _Match(ours, theirs)
        if match.regrouped:
            of = f"of {name!r} " if name else ""
            raise CheckpointError(
                f"{self._source} is of another optimizer: {of}its parameter groups have "
                f"{[*map(len, theirs)]} parameters, the trainer's {sizes}, and {match.regrouped}: give the "
                f"optimizer the groups of the checkpoint, {_ADVICE}"
            )
        if not loads_as_torch(optimizer) or isinstance(optimizer, torch.optim.LBFGS):
            raise CheckpointError(
                f"{self._source} has the parameters of the {_called(name)} in another order, or other ones, "
                f"and {type(optimizer).__name__} has no state for each parameter that could be arranged: it "
                f"has {match.first[0]}, the trainer {match.first[1]}: give the optimizer the parameters of "
                f"the checkpoint, in their order, {_ADVICE}"
            )
        self._list_strangers(name, match)
        arranged = _arranged(state, optimizer, match)
        several = {**self.checkpoint["optimizer"], name: arranged} if name else arranged
        self.checkpoint["optimizer"] = several
        self._arrange_groups(name, optimizer, match.places, len(theirs))

    def _list_strangers(self, name: str, match: _Match) -> None:
        if match.gone or match.new:
            self.changes.append(Change(_of_parameters(name), match.gone, match.new, "given"))
        if match.gone:
            self.lines.append(f"the state of {', '.join(match.gone)} in the {_called(name)} is not loaded")
        if match.new:
            self.lines.append(f"the {_called(name)} begins without a state of {', '.join(match.new)}")

    def _arrange_groups(self, name: str, optimizer: Any, places: Sequence[int | None], number: int) -> None:
        """Arrange what else knows param groups by their place: the settings, and the schedulers' states."""
        if [*places] == [*range(number)]:
            return
        former = self._settings["optimizer"].get(name, [])
        groups = [{} if place is None else former[place] for place in places]
        if new := [index for index, place in enumerate(places) if place is None]:
            self.new_groups[name] = new
        self._settings["optimizer"] = {**self._settings["optimizer"], name: groups}
        for index in own_schedulers(self._trainer.schedulers, optimizer):
            kind = type(self._trainer.schedulers[index])
            if kind.__module__.partition(".")[0] not in ("torch", "eventloop"):
                raise CheckpointError(
                    f"{self._source} has the param groups of the {_called(name)} in another order, and the "
                    f"state of {kind.__name__} may have a value for each: give the optimizer the groups of "
                    f"the checkpoint, in their order, {_ADVICE}"
                )
            for states in (self.checkpoint["param_schedulers"], self._settings["param_schedulers"]):
                states[index] = by_group(states[index], self._built[index], places, number)

    # --- schedulers ----------------------------------------------------------------------------------------

    def _arrange_schedulers(self) -> None:
        """Give each scheduler the state that a scheduler of its class and optimizer has left."""
        meta, states = self.checkpoint["meta"], self.checkpoint["param_schedulers"]
        kinds, owners = meta["param_schedulers"], meta.get("scheduler_optimizers", [])
        own_kinds = [type(scheduler).__name__ for scheduler in self._trainer.schedulers]
        own, saved = own_kinds, [*kinds]
        if len(owners) == len(kinds):  # not saved by an earlier version
            own = [*map(_scheduler, own_kinds, scheduler_optimizers(self._trainer))]
            saved = [*map(_scheduler, kinds, owners)]
        if sorted(saved) != sorted(own) or len(states) != len(own):
            raise CheckpointError(
                f"{self._source} has the state of the schedulers {saved}, the trainer has {own}: give it the "
                f"same, {_ADVICE}"
            )
        left = [*range(len(saved))]
        order = [left.pop(next(i for i, place in enumerate(left) if saved[place] == each)) for each in own]
        constants = self._settings["param_schedulers"]
        if len(constants) == len(order):
            constants = [constants[place] for place in order]
        self._settings["param_schedulers"] = [*constants]
        self.checkpoint["param_schedulers"] = [states[place] for place in order]


def names_in(checkpoint: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any]:
    """Return the weights of a checkpoint by name, and its `meta.parameters`, in containers of their own."""
    weights, meta = checkpoint.get("state_dict"), checkpoint.get("meta")
    parameters = meta.get("parameters") if isinstance(meta, Mapping) else None
    return dict(weights) if isinstance(weights, Mapping) else {}, copied(parameters)


def follow_renamed(before: tuple[Mapping[str, Any], Any], checkpoint: dict[str, Any]) -> None:
    """Give parameters the names that a handler has given to their weights, wherever a checkpoint names them.

    The same tensor under another name was renamed. Then its state in the optimizer is found, too. A handler
    that has changed `meta.parameters` has done so itself.

    Args:
        before: the result of `names_in` before the handlers of `after_load_checkpoint`.
        checkpoint: the contents of the checkpoint after them; not changed in place, except by new values.
    """
    (former, known), meta, after = before, checkpoint.get("meta"), checkpoint.get("state_dict")
    if not isinstance(meta, Mapping) or not isinstance(after, Mapping):
        return
    now = {id(value): name for name, value in after.items()}
    names = {old: now[id(value)] for old, value in former.items() if now.get(id(value), old) != old}
    parameters = meta.get("parameters")
    if not names or parameters is None or parameters != known:
        return

    def renamed(each: Iterable[str]) -> list[str]:
        return [names.get(name, name) for name in each]

    groups = {
        key: ["\n".join(renamed(group.split("\n"))) for group in value] for key, value in parameters.items()
    }
    checkpoint["meta"] = meta = {**meta, "parameters": groups}
    for owner in (meta, settings := {**meta["settings"]}):
        if owner.get("frozen") is not None:
            owner["frozen"] = renamed(owner["frozen"])
    meta["settings"] = settings
    if OWN in checkpoint:
        checkpoint[OWN] = {names.get(name, name): value for name, value in checkpoint[OWN].items()}


def scheduler_optimizers(trainer: ResumableTrainer) -> list[str]:
    """Return the name of the optimizer of each scheduler; "" for a single or an unknown one."""
    names = {id(optimizer): name for name, optimizer in named_optimizers(trainer.optimizer).items()}
    return [names.get(id(getattr(each, "optimizer", None)), "") for each in trainer.schedulers]


def _scheduler(kind: str, owner: str) -> str:
    return f"{kind} of {owner!r}" if owner else kind


def _of_parameters(name: str) -> str:
    return f"parameters of the {_called(name)}"


def _called(name: str) -> str:
    return f"optimizer {name!r}" if name else "optimizer"


class _Match:
    """The parameters of an optimizer and of its saved state, matched by their labels.

    Args:
        ours, theirs: the labels by param group.
    """

    def __init__(self, ours: list[list[str]], theirs: list[list[str]]) -> None:
        self.ours = ours
        self.where = {label: (i, j) for i, group in enumerate(theirs) for j, label in enumerate(group)}
        own = {label for group in ours for label in group}
        self.gone = [label for label in self.where if label not in own]
        self.new = [label for group in ours for label in group if label not in self.where]
        self.places: list[int | None] = []
        """For each param group the one of the checkpoint that has its parameters; None if none has."""
        self.regrouped = ""
        """Two parameters that only one side has in one group, as a part of an error message."""
        known: dict[int, str] = {}
        for group in ours:
            found = {self.where[label][0]: label for label in group if label in self.where}
            self.places.append(place := next(iter(found), None))
            if len(found) > 1:
                self.regrouped = f"{' and '.join([*found.values()][:2])} are in different groups there"
            elif place is not None and known.setdefault(place, found[place]) != found[place]:
                self.regrouped = f"{known[place]} and {found[place]} are in one group there"

    @property
    def first(self) -> tuple[str, str]:
        """The first parameters that differ, of the checkpoint and of the trainer."""
        theirs, own = [*self.where], [label for group in self.ours for label in group]
        pairs = zip([*theirs, *[""] * len(own)], [*own, *[""] * len(theirs)], strict=False)
        return next(((repr(a), repr(b)) for a, b in pairs if a != b), ("other param groups", "its own"))


def _arranged(state: Mapping[str, Any], optimizer: Any, match: _Match) -> dict[str, Any]:
    """Return an optimizer's state with the parameters and param groups of the optimizer, in its order.

    A group that the state does not have keeps the optimizer's own settings.
    """
    saved = state["param_groups"]
    numbered = {number for group in saved for number in group["params"]}
    states = {key: value for key, value in state["state"].items() if key not in numbered}
    groups: list[dict[str, Any]] = []
    number = 0
    for own, labels, place in zip(optimizer.param_groups, match.ours, match.places, strict=True):
        group = without_parameters(own if place is None else saved[place])
        group["params"] = [*range(number, number + len(labels))]
        if "param_names" in own:
            group["param_names"] = own["param_names"]
        groups.append(group)
        for label in labels:
            i, j = match.where.get(label, (-1, -1))
            if i >= 0 and (key := saved[i]["params"][j]) in state["state"]:
                states[number] = state["state"][key]
            number += 1
    return {**state, "state": states, "param_groups": groups}
