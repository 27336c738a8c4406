"""Bring a checkpoint's states of optimizers and schedulers into the order of the trainer's parameters.

PyTorch's states have only the index of a parameter, a param group or a scheduler, not its name. If the order
differs and the states were loaded as they are, a parameter would continue with the moments of another one.
So `check_resume` first brings all states into the trainer's order by the names of the parameters, and only
then compares the settings.
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
        built: the states of the trainer's schedulers when the trainer was built.
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
        """The changes of the optimizers' parameters: those that only one side has."""
        self.lines: list[str] = []
        """The lines to log if the run continues."""
        self.new_groups: dict[str, list[int]] = {}
        """The indices of the param groups that the checkpoint does not have, by the optimizer's name."""

    def arrange(self) -> None:
        """Arrange all states, in `checkpoint`, and record the parameters that only one side has.

        Raises:
            CheckpointError: the optimizers, schedulers or param groups of the checkpoint do not correspond to
                the trainer's.
        """
        check_optimizers(self._trainer.optimizer, self.checkpoint, self._source)
        self._arrange_schedulers()
        # without names, of a checkpoint by an earlier version of eventloop, the order stays as it is
        saved = self.checkpoint["meta"].get("parameters", {})
        trainer = self._trainer
        own = parameter_names(unwrap(trainer.model), trainer.loss_fn, trainer.optimizer)
        for name, optimizer in named_optimizers(self._trainer.optimizer).items():
            if name in saved:
                with refusing(f"{self._source}: the state of the {_called(name)} cannot be arranged by name"):
                    self._arrange_optimizer(name, optimizer, own[name], saved[name])

    @property
    def names(self) -> list[str]:
        """Return the names of settings that the changes in `changes` may have."""
        return [_of_parameters(name) for name in named_optimizers(self._trainer.optimizer)]

    # --- optimizers ----------------------------------------------------------------------------------------

    def _arrange_optimizer(self, name: str, optimizer: Any, own: list[str], saved: list[str]) -> None:
        """Arrange the state of one optimizer, and the settings and schedules of its param groups.

        Args:
            name: the name of the optimizer; "" for a single one.
            own, saved: the names of the parameters of the optimizer, and of its state in the checkpoint. Each
                text has the names of a param group, one on each line.
        """
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
        states = {**self.checkpoint["optimizer"], name: arranged} if name else arranged
        self.checkpoint["optimizer"] = states
        self._arrange_groups(name, optimizer, match.places, len(theirs))

    def _list_strangers(self, name: str, match: _Match) -> None:
        """Record the parameters that only the checkpoint or only the trainer has."""
        if match.gone or match.new:
            self.changes.append(Change(_of_parameters(name), match.gone, match.new, "given"))
        if match.gone:
            self.lines.append(f"the state of {', '.join(match.gone)} in the {_called(name)} is not loaded")
        if match.new:
            self.lines.append(f"the {_called(name)} begins without a state of {', '.join(match.new)}")

    def _arrange_groups(self, name: str, optimizer: Any, places: Sequence[int | None], number: int) -> None:
        """Arrange the saved settings of an optimizer's param groups, and the states of its schedulers.

        Args:
            places: for each param group of the trainer its index in the checkpoint; None for a new group.
            number: the number of param groups in the checkpoint.
        """
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
        """Bring the states of schedulers into the trainer's order, by class and by the optimizer's name.

        Schedulers of one class and optimizer keep their order.
        """
        meta, states = self.checkpoint["meta"], self.checkpoint["param_schedulers"]
        kinds, owners = meta["param_schedulers"], meta.get("scheduler_optimizers", [])
        own_kinds = [type(scheduler).__name__ for scheduler in self._trainer.schedulers]
        own, saved = own_kinds, [*kinds]
        if len(owners) == len(kinds):  # earlier versions of eventloop did not save the owners
            own = [*map(_scheduler, own_kinds, scheduler_optimizers(self._trainer))]
            saved = [*map(_scheduler, kinds, owners)]
        if sorted(saved) != sorted(own) or len(states) != len(own):
            raise CheckpointError(
                f"{self._source} has the state of the schedulers {saved}, the trainer has {own}: give it the "
                f"same, {_ADVICE}"
            )
        unused = [*range(len(saved))]  # indices in the checkpoint
        order = [
            unused.pop(next(i for i, index in enumerate(unused) if saved[index] == scheduler))
            for scheduler in own
        ]
        arguments = self._settings["param_schedulers"]
        if len(arguments) == len(order):
            arguments = [arguments[index] for index in order]
        self._settings["param_schedulers"] = [*arguments]
        self.checkpoint["param_schedulers"] = [states[index] for index in order]


def names_in(checkpoint: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any]:
    """Return copies of the mapping of a checkpoint's weights by name, and of its `meta.parameters`."""
    weights, meta = checkpoint.get("state_dict"), checkpoint.get("meta")
    parameters = meta.get("parameters") if isinstance(meta, Mapping) else None
    return dict(weights) if isinstance(weights, Mapping) else {}, copied(parameters)


def follow_renamed(before: tuple[Mapping[str, Any], Any], checkpoint: dict[str, Any]) -> None:
    """Rename parameters everywhere in a checkpoint as a handler has renamed their weights in `state_dict`.

    A weight was renamed if the same tensor has another name now. The parameter's state in the optimizer is
    found by the new name then. If the handler has changed `meta.parameters` itself, nothing is done.

    Args:
        before: the result of `names_in` before the handlers of `after_load_checkpoint`.
        checkpoint: the contents of the checkpoint after the handlers. Its keys get new values; the values
            themselves stay unchanged.
    """
    (former, known), meta, after = before, checkpoint.get("meta"), checkpoint.get("state_dict")
    if not isinstance(meta, Mapping) or not isinstance(after, Mapping):
        return
    new_names = {id(tensor): name for name, tensor in after.items()}
    names = {
        old: new_names[id(tensor)] for old, tensor in former.items() if new_names.get(id(tensor), old) != old
    }
    parameters = meta.get("parameters")
    if not names or parameters is None or parameters != known:
        return

    def renamed(old_names: Iterable[str]) -> list[str]:
        return [names.get(name, name) for name in old_names]

    # each text has the names of a param group, one on each line
    by_optimizer = {
        optimizer: ["\n".join(renamed(text.split("\n"))) for text in texts]
        for optimizer, texts in parameters.items()
    }
    checkpoint["meta"] = meta = {**meta, "parameters": by_optimizer}
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
    """Return a text with the class of a scheduler, and the name of its optimizer if there are several."""
    return f"{kind} of {owner!r}" if owner else kind


def _of_parameters(name: str) -> str:
    """Return the name of the setting that the parameters of an optimizer are, for changes and messages."""
    return f"parameters of the {_called(name)}"


def _called(name: str) -> str:
    return f"optimizer {name!r}" if name else "optimizer"


class _Match:
    """The parameters of an optimizer and of its saved state, matched by their labels.

    Args:
        ours, theirs: the labels of the trainer's and of the checkpoint's parameters, in a list for each param
            group. A label is a parameter's name, or a text that stands for a parameter without a name.
    """

    def __init__(self, ours: list[list[str]], theirs: list[list[str]]) -> None:
        self.ours = ours
        self.where = {label: (i, j) for i, group in enumerate(theirs) for j, label in enumerate(group)}
        """The index of the group in the checkpoint, and the index in that group, by label."""
        own = {label for group in ours for label in group}
        self.gone = [label for label in self.where if label not in own]
        self.new = [label for group in ours for label in group if label not in self.where]
        self.places: list[int | None] = []
        """For each param group its index in the checkpoint; None if no group there has its parameters."""
        self.regrouped = ""
        """A text on two parameters that share a group on one side only; "" if there are none."""
        first_of_group: dict[int, str] = {}  # a label of the trainer's group, by the checkpoint's group
        for group in ours:
            theirs_with = {self.where[label][0]: label for label in group if label in self.where}
            self.places.append(place := next(iter(theirs_with), None))
            if len(theirs_with) > 1:
                two_labels = " and ".join([*theirs_with.values()][:2])
                self.regrouped = f"{two_labels} are in different groups there"
            elif place is not None:
                label = theirs_with[place]
                if (other := first_of_group.setdefault(place, label)) != label:
                    self.regrouped = f"{other} and {label} are in one group there"

    @property
    def first(self) -> tuple[str, str]:
        """The first two parameters at one index that differ: the checkpoint's, then the trainer's."""
        theirs, own = [*self.where], [label for group in self.ours for label in group]
        pairs = zip([*theirs, *[""] * len(own)], [*own, *[""] * len(theirs)], strict=False)
        return next(((repr(a), repr(b)) for a, b in pairs if a != b), ("other param groups", "its own"))


def _arranged(state: Mapping[str, Any], optimizer: Any, match: _Match) -> dict[str, Any]:
    """Return an optimizer's saved state in the order of the optimizer's parameters and param groups.

    A group that the state does not have keeps the optimizer's own settings.
    """
    saved = state["param_groups"]
    numbers = {number for group in saved for number in group["params"]}
    # other entries, which some optimizers have besides the states of the parameters
    states = {key: value for key, value in state["state"].items() if key not in numbers}
    groups: list[dict[str, Any]] = []
    number = 0  # of the parameter, in the trainer's order
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
