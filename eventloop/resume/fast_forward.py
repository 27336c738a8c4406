"""The schedules of a trainer, brought anew to the step that a checkpoint was taken at; and those that lead nowhere.

PyTorch's schedules multiply the last rate, so that one that has come to 0 stays there whatever its arguments are from then
on. With other arguments a schedule is therefore begun once more, on a stand-in of the optimizer, and stepped as often
as it was: it then has the value, and the state, that it had come to with these arguments from the first step on.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from eventloop.optim.lean_step import stepper
from eventloop.optim.optimizers import named_optimizers
from eventloop.optim.windows import PROGRESS, PlateauWindow, Window
from eventloop.resume.protocols import ResumableTrainer
from eventloop.state.schema import LastStep, check_alike, read_as
from eventloop.util.errors import CheckpointError

LOOK = 1000
"""How many steps ahead it is looked whether a rate of 0 comes to life again."""


class Anew(NamedTuple):
    """The states of the schedulers of an optimizer, and its param groups, without the parameters."""

    states: list[dict[str, Any]]
    groups: list[dict[str, Any]]


class _StandIn(Optimizer):
    """Param groups without their parameters; everything else is in them, for schedules keep arguments there."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        super().__init__([{**without_parameters(group), "params": [torch.empty(0)]} for group in groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: there are no parameters."""


def without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of all that schedules look at in a param group."""
    return {k: _copied(v) for k, v in group.items() if k not in ("params", "param_names")}


def own_schedulers(trainer: ResumableTrainer, optimizer: Any) -> list[int]:
    """The numbers of the schedulers of one optimizer."""
    owners = [getattr(scheduler, "optimizer", None) for scheduler in trainer.schedulers]
    return [number for number, owner in enumerate(owners) if owner is optimizer]


def bring_anew(
    schedulers: Sequence[Any],
    built: Sequence[Mapping[str, Any]],
    begun_with: Sequence[Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    meta: Mapping[str, Any],
) -> Anew | None:
    """The states of all schedulers of an optimizer, and its param groups, once they have made as many steps as the saved
    ones; None where that cannot be known: one follows a metric, or is of a class of somebody's own.

    Args:
        built, begun_with: their states, and the groups, before anything was trained.
        saved, meta: of the checkpoint. In which order they were stepped is told by its counters.
    """
    if not all(map(_counts_steps_alone, schedulers)):
        return None
    steps = [_to_make(now, then, meta) - _made(then) for now, then in zip(saved, built, strict=True)]
    if min(steps) < 0:
        return None
    with _apart(schedulers, built, begun_with) as (copies, stand_in):
        epochs = meta["epoch"]
        of_epoch = (meta["iter"] - meta["position"]["batch_idx"]) / epochs if epochs else 1.0
        _step_all([stepper(each) for each in copies], steps, of_epoch)
        groups = [without_parameters(group) for group in stand_in.param_groups]
        return Anew([copy.deepcopy(each.state_dict()) for each in copies], groups)


def keys_of(scheduler: Any) -> set[str]:
    """What it moves in the param groups."""
    name = getattr(scheduler, "param_name", "lr")
    keys = {name, "betas"} if name == "momentum" else {name}
    if getattr(scheduler, "cycle_momentum", False):
        keys |= {"momentum", "betas"}
    for inner in getattr(scheduler, "_schedulers", ()):
        keys |= keys_of(inner)
    return keys


def values_told(
    name: str,
    groups: list[dict[str, Any]],
    anew: list[dict[str, Any]],
    keys: set[str],
    listed: Collection[tuple[str, int, str] | None],
) -> Iterator[str]:
    """Yield a line per recomputed value that differs."""
    of_optimizer = f"{name} " if name else ""
    for number, (group, own) in enumerate(zip(groups, anew, strict=True)):
        of = f" of param group {number}" if len(groups) > 1 else ""
        for key in sorted(keys & group.keys()):
            if (name, number, key) not in listed and not _close(group[key], own[key]):
                left, now = (v.item() if isinstance(v, torch.Tensor) else v for v in (group[key], own[key]))
                yield (
                    f"{of_optimizer}{key}{of}: {left!r} as the checkpoint's schedules left it, {now!r} where those of this "
                    f"trainer are at this step; the run goes on with {now!r}"
                )


def put_values(groups: Sequence[dict[str, Any]], values: Sequence[Mapping[str, Any]], keys: set[str]) -> None:
    """Give param groups the values of others; a tensor, which a compiled or captured step holds, stays the same."""
    for group, given in zip(groups, values, strict=True):
        for key in keys & group.keys():
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(given[key])
            else:
                group[key] = given[key]


def with_arguments(saved: Mapping[str, Any], built: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a scheduler where `saved` was, with the arguments it was `built` with."""
    merged = dict(saved)
    for key, value in built.items():
        if key not in saved or (key in PROGRESS and key != "base_lrs"):
            continue
        if key == "scheduler":  # of a window, None as long as it has not begun
            merged[key] = saved[key] and with_arguments(saved[key], value)
        elif key == "_schedulers":
            merged[key] = [with_arguments(*pair) for pair in zip(saved[key], value, strict=True)]
        else:
            merged[key] = value
    return merged


def check_scheduler_state(scheduler: Any, saved: Mapping[str, Any], what: str) -> None:
    """Refuse what does not say how many steps were made, or has a value of another kind than the scheduler.

    Raises:
        CheckpointError: with the key, what was expected and what was found.
    """
    own = scheduler.state_dict()
    if not isinstance(own, Mapping):
        return
    for key in ("last_epoch", "last_step"):
        if key in own:
            read_as(LastStep, saved.get(key), f"{what}[{key!r}] cannot be loaded")
    check_alike(saved, own, what)
    if "_schedulers" in own:
        parts = getattr(scheduler, "_schedulers", ())
        states = read_as(
            list[dict[str, Any]], saved.get("_schedulers"), f"{what}['_schedulers'] cannot be loaded"
        )
        if len(states) != len(parts):
            raise CheckpointError(
                f"{what}['_schedulers'] is wrong: expected {len(parts)} states, got {len(states)}"
            )
        for number, pair in enumerate(zip(parts, states, strict=True)):
            check_scheduler_state(*pair, f"{what}['_schedulers'][{number}]")


def standing_still(trainer: ResumableTrainer) -> list[str]:
    """The optimizers, by name, with a rate that is 0, was not always, and that their schedules leave at 0."""
    left = LOOK if trainer.max_iters is None else min(LOOK, trainer.max_iters - trainer.iter)
    found = []
    for name, optimizer in named_optimizers(trainer.optimizer).items():
        numbers = own_schedulers(trainer, optimizer)
        still = [i for i, group in enumerate(optimizer.param_groups) if _has_stopped(group)]
        if numbers and still and left > 0:
            schedulers = [trainer.schedulers[number] for number in numbers]
            if not _revives([s for s in schedulers if not _follows(s)], optimizer.param_groups, still, left):
                found.append(name)
    return found


def too_short(
    trainer: ResumableTrainer, number: int, state: Mapping[str, Any], meta: Mapping[str, Any]
) -> str | None:
    """Of a OneCycleLR in a run that was made longer, which raises in the middle of it: the steps that it has, and that
    there would be."""
    if type(trainer.schedulers[number]) is not OneCycleLR:
        return None
    done = state["last_epoch"]
    unit = "iter" if done == meta["iter"] else "epoch" if done == meta["epoch"] else None
    if unit is None:
        return None
    former, own = meta[f"max_{unit}s"], getattr(trainer, f"max_{unit}s")
    if former is None or own is None or own <= former or own <= state["total_steps"]:
        return None
    return f"a OneCycleLR of total_steps={state['total_steps']} raises after them, and this run has {own}"


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # of somebody's own, at which no schedule looks
        return value


def _made(state: Mapping[str, Any]) -> int:
    """The steps that a scheduler has made. A ChainedScheduler counts nothing itself."""
    if "last_step" in state:
        return int(state["last_step"])
    return int(state["last_epoch"]) if "last_epoch" in state else _made(state["_schedulers"][0])


def _to_make(saved: Mapping[str, Any], built: Mapping[str, Any], meta: Mapping[str, Any]) -> int:
    """The steps that were made; of a window that counts in another unit now those of that unit."""
    if "by_epoch" in built and built["by_epoch"] != saved["by_epoch"]:
        return int(meta["epoch" if built["by_epoch"] else "iter"])
    return _made(saved)


def _follows(scheduler: Any) -> bool:
    return isinstance(scheduler, PlateauWindow | ReduceLROnPlateau)


def _counts_steps_alone(scheduler: Any) -> bool:
    """Its values follow from the number of its steps."""
    if _follows(scheduler):
        return False
    own = type(scheduler).__module__.startswith("torch.") or isinstance(scheduler, Window)
    return own and all(map(_counts_steps_alone, getattr(scheduler, "_schedulers", ())))


@contextmanager
def _apart(
    schedulers: Sequence[Any], states: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[list[Any], _StandIn]]:
    """Copies of schedulers in given states, on an optimizer of their own."""
    stand_in = _StandIn(groups)
    with warnings.catch_warnings():  # of steps without those of an optimizer
        warnings.simplefilter("ignore")
        copies = []
        for scheduler, state in zip(schedulers, states, strict=True):
            if isinstance(scheduler, Window):
                copies.append(scheduler.moved_to(stand_in, copy.deepcopy(state)))
            else:
                other = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in})
                other.load_state_dict(copy.deepcopy(dict(state)))
                copies.append(other)
        yield copies, stand_in


def _step_all(steps: Sequence[Callable[[], object]], counts: Sequence[int], of_epoch: float) -> None:
    """Step each as often as it is to be: those that are stepped most in each iteration, and the others, which count
    epochs, at the ends of these."""
    most = max(counts)
    often = [step for step, count in zip(steps, counts, strict=True) if count == most]
    seldom = [(step, count) for step, count in zip(steps, counts, strict=True) if count < most]
    ends = 0
    for done in range(1, most + 1):
        for step in often:
            step()
        if seldom and done >= (ends + 1) * of_epoch:
            ends += 1
            for step, count in seldom:
                if ends <= count:
                    step()
    for step, count in seldom:
        for _ in range(count - ends):
            step()


def _has_stopped(group: Mapping[str, Any]) -> bool:
    return float(group.get("lr", 1)) == 0 and float(group.get("initial_lr", 0)) != 0


def _revives(schedulers: Sequence[Any], groups: Sequence[Any], still: list[int], left: int) -> bool:
    """Whether one of the rates that are 0 is another one within some steps; True where that cannot be found out."""
    try:
        states = [scheduler.state_dict() for scheduler in schedulers]
        with _apart(schedulers, states, [without_parameters(group) for group in groups]) as (
            copies,
            stand_in,
        ):
            for _ in range(left):
                for each in copies:
                    each.step()
                if any(float(stand_in.param_groups[i]["lr"]) for i in still):
                    return True
    except Exception:  # somebody's own, which cannot be copied or ends here
        return True
    return False


def _close(a: Any, b: Any) -> bool:
    """The same but for how it was rounded: Adam's `betas` are two."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_close, a, b))
    return math.isclose(float(a), float(b), rel_tol=1e-9)
