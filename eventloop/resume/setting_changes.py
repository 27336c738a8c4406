"""Describe the settings that differ between a checkpoint and the trainer that resumes from it.

`Settings` finds the changes, `checking` refuses them, and `loading` makes the lines that are logged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from eventloop.util.errors import CheckpointError
from eventloop.util.suggest import near, suggest

Choice = Literal["refuse", "keep", "apply"]
"""Whether changes are refused, or the run continues with the checkpoint's ("keep") or its own values."""
Changed = Choice | Mapping[str, Choice]
"""The argument `changed` of `Trainer.resume`: a choice for all settings, or one for each named setting."""
CHOICES: tuple[Choice, ...] = ("refuse", "keep", "apply")
LOADER_SETTINGS = ("batch_size", "loader_length", "dataset_length", "sampler")
FROZEN, BUFFERS, POSITION = "frozen parameters", "types of buffers", "position"
"""The names of changes that are no settings of optimizers, schedulers, loaders or hooks."""
OF_RANKS = ("data_ranks", "world_size")
"""The settings that change with the number of processes."""
_FOLLOWS = {
    "data_ranks": ("world_size",),
    "loader_length": ("world_size", "data_ranks", "batch_size"),
    "dataset_length": ("world_size", "data_ranks"),
    POSITION: ("world_size", "data_ranks"),
}
"""For each setting that changes as a consequence of other settings, the names of these others."""


class Change(msgspec.Struct, frozen=True):
    """A setting whose value in the checkpoint differs from this trainer's.

    Args:
        name: the label of the setting in messages.
        saved, own: the checkpoint's value and this trainer's.
        kind: "loaded" if the run can continue with either value. "given" if it must continue with this
            trainer's, which `changed` has to permit. "noted" if it continues with this trainer's without
            permission.
        group: the optimizer's name, the index of the param group, and the key, if a param group holds the
            setting.
        scheduler: the scheduler's index in `trainer.schedulers`, if the setting is an argument of a
            scheduler.
    """

    name: str
    saved: Any
    own: Any
    kind: Literal["loaded", "given", "noted"]
    group: tuple[str, int, str] | None = None
    scheduler: int | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.saved!r} in the checkpoint, {self.own!r} in this trainer"

    def reschedules(self, name: str, numbers: Collection[int], keys: Collection[str]) -> bool:
        """Return whether the change alters the values that the schedulers of an optimizer compute.

        These depend on the arguments of the schedulers, and on the base values in the param groups.

        Args:
            name: the name of the optimizer.
            numbers: the indices of the schedulers in `trainer.schedulers`.
            keys: the keys of the param groups that the schedulers write. Arguments that PyTorch stores in the
                groups, such as `max_lr`, count as well.
        """
        if self.group is not None:
            key = self.group[2]
            return self.group[0] == name and (key in keys or key.partition("_")[2] in keys)
        return self.scheduler in numbers


def check_changed(changed: object) -> None:
    """Raise ValueError if the argument `changed` of `Trainer.resume` is invalid."""
    answers = changed if isinstance(changed, Mapping) else {"": changed}
    for name, answer in answers.items():
        if answer not in CHOICES:
            argument = f"changed[{name!r}]" if name else "changed"
            raise ValueError(
                f'{argument} must be "refuse", "keep" or "apply", got {answer!r}{near(str(answer), CHOICES)}'
            )


def choose(path: object, changed: Changed, changes: list[Change], known: Collection[str]) -> Choice:
    """Return the choice for those changed settings that may be the checkpoint's or this trainer's.

    Args:
        path: the path of the checkpoint.
        changed: the argument of `Trainer.resume`: one choice for all settings, or a mapping from the names of
            settings to choices.
        changes: the changed settings.
        known: the names of the settings that were compared.

    Raises:
        CheckpointError: `changed` refuses one of the changes.
        ValueError: `changed` names an unknown setting, or makes different choices for settings that need the
            same one.
    """
    if isinstance(changed, str):
        if changed == "refuse" and (message := refusal(path, changes)) is not None:
            raise CheckpointError(message)
        return changed
    # these may be named even if they do not differ: a hand-written loop compares its loader later
    names = {*known, *LOADER_SETTINGS, FROZEN, BUFFERS, POSITION}
    for name in changed:
        if name not in names:
            raise ValueError(f"changed has an unknown setting {name!r}{suggest(str(name), sorted(names))}")
    if (message := refusal(path, refused_by(changed, changes))) is not None:
        raise CheckpointError(f"{message}; or give changed={{name: answer}} an answer for each")
    answers = {c.name: answer_for(c, changed, changes) for c in changes if c.kind == "loaded"}
    if len({*answers.values()}) > 1:
        raise ValueError(
            "changed must give one answer for all settings of optimizers and schedulers that differ, and for "
            f"what the script freezes, got {answers}"
        )
    return next(iter(answers.values()), "refuse")


def refused_by(changed: Changed, changes: Sequence[Change]) -> list[Change]:
    """Return the changes that `changed` refuses."""
    return [c for c in changes if c.kind != "noted" and answer_for(c, changed, changes) == "refuse"]


def answer_for(change: Change, changed: Changed, changes: Sequence[Change]) -> Choice:
    """Return the choice that `changed` makes for a change, by its name or by the name of its cause.

    For example, the choice for `world_size` is also that for the length of the loader, which follows from it.

    Args:
        change: the change.
        changed: the argument of `Trainer.resume`.
        changes: all changes, among which the cause is.
    """
    if isinstance(changed, str):
        return changed
    differing = {each.name: each for each in changes}
    for name in (change.name, *_FOLLOWS.get(change.name, ())):
        ranks = differing.get("data_ranks", differing.get(name))
        is_other_data = change.name == "dataset_length" != name and not _is_same_data(change, ranks)
        if name in changed and name in differing and not is_other_data:
            return changed[name]
    return "refuse"


def _is_same_data(length: Change, ranks: Change | None) -> bool:
    """Return whether each rank has an equal part of the same data set before and after a change of ranks.

    The lengths of the parts times the numbers of ranks are then equal, except for samples that fill up the
    parts or are left out: fewer than there are ranks.

    Args:
        length: the change of the length of a rank's part.
        ranks: the change of the number of ranks; None if that has not changed.
    """
    if ranks is None:
        return False
    difference = abs(length.saved * ranks.saved - length.own * ranks.own)
    return bool(difference < max(ranks.saved, ranks.own))


def refusal(path: object, changes: list[Change]) -> str | None:
    """Return an error message with the changes, and with the values of `changed` that permit them.

    Return None if all changes are "noted".

    Args:
        path: the path of the checkpoint.
    """
    if not (refused := [change for change in changes if change.kind != "noted"]):
        return None
    given = [change.name for change in refused if change.kind == "given"]
    ways = []  # the values of `changed` that permit the changes, each with its effect
    if len(given) < len(refused):
        ways.append(
            'resume(path, changed="keep") continues with the checkpoint\'s values, changed="apply" with this '
            "trainer's"
        )
    if given:
        choice = "with either" if ways else 'with changed="apply" the run continues, and'
        ways.append(f"{choice} {', '.join(given)} {'is' if len(given) == 1 else 'are'} this trainer's")
    lines = "\n  ".join(map(str, changes))
    return f"{path} is of a run with other settings; nothing was loaded:\n  {lines}\n{'; '.join(ways)}"
