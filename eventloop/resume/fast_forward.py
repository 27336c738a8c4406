"""Recompute the schedules of a trainer up to the step of a checkpoint, and find rates that stay at 0.

`settings` uses it after a resume with other arguments. PyTorch's schedules multiply the last rate, so a rate
of 0 stays 0 whatever the new arguments are. Such a schedule therefore starts again on a stand-in for the
optimizer and makes the steps of the checkpoint: it then has the value and the state that the new arguments
give from the first step on.
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

LOOKAHEAD_STEPS = 1000
"""The number of steps simulated to see whether a rate of 0 rises again."""


class Recomputed(NamedTuple):
    """The states of the schedulers of an optimizer, and its param groups, without the parameters."""

    states: list[dict[str, Any]]
    groups: list[dict[str, Any]]


class _StandIn(Optimizer):
    """An optimizer with copies of param groups, without their parameters.

    Every other entry of the groups is copied, because schedules keep arguments there.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        super().__init__([{**without_parameters(group), "params": [torch.empty(0)]} for group in groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: there are no parameters."""


def without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a param group without its parameters."""
    return {k: _copied(v) for k, v in group.items() if k not in ("params", "param_names")}


def own_schedulers(trainer: ResumableTrainer, optimizer: Any) -> list[int]:
    """Return the indices of the schedulers of one optimizer."""
    owners = [getattr(scheduler, "optimizer", None) for scheduler in trainer.schedulers]
    return [number for number, owner in enumerate(owners) if owner is optimizer]


def recompute(
    schedulers: Sequence[Any],
    built: Sequence[Mapping[str, Any]],
    begun_with: Sequence[Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    meta: Mapping[str, Any],
) -> Recomputed | None:
    """Return the schedulers' states and the param groups of an optimizer after the steps of a checkpoint.

    Returns None if they cannot be computed: a scheduler follows a metric, or is of the user's own class.

    Args:
        built, begun_with: the schedulers' states, and the param groups, before anything was trained.
        saved, meta: of the checkpoint. Its counters give the order in which the schedulers were stepped.
    """
    if not all(map(_counts_steps_alone, schedulers)):
        return None
    steps = [
        _steps_to_make(now, then, meta) - _steps_done(then) for now, then in zip(saved, built, strict=True)
    ]
    if min(steps) < 0:
        return None
    with _copies(schedulers, built, begun_with) as (copies, stand_in):
        epochs = meta["epoch"]
        of_epoch = (meta["iter"] - meta["position"]["batch_idx"]) / epochs if epochs else 1.0
        _step_all([stepper(each) for each in copies], steps, of_epoch)
        groups = [without_parameters(group) for group in stand_in.param_groups]
        return Recomputed([copy.deepcopy(each.state_dict()) for each in copies], groups)


def keys_of(scheduler: Any) -> set[str]:
    """Return the keys of the param groups that a scheduler writes."""
    name = getattr(scheduler, "param_name", "lr")
    keys = {name, "betas"} if name == "momentum" else {name}
    if getattr(scheduler, "cycle_momentum", False):
        keys |= {"momentum", "betas"}
    for inner in getattr(scheduler, "_schedulers", ()):
        keys |= keys_of(inner)
    return keys


def changed_values(
    name: str,
    groups: list[dict[str, Any]],
    recomputed: list[dict[str, Any]],
    keys: set[str],
    listed: Collection[tuple[str, int, str] | None],
) -> Iterator[str]:
    """Yield a log line for each recomputed value that differs from the current one."""
    of_optimizer = f"{name} " if name else ""
    for number, (group, own) in enumerate(zip(groups, recomputed, strict=True)):
        of = f" of param group {number}" if len(groups) > 1 else ""
        for key in sorted(keys & group.keys()):
            if (name, number, key) not in listed and not _close(group[key], own[key]):
                left, now = (v.item() if isinstance(v, torch.Tensor) else v for v in (group[key], own[key]))
                yield (
                    f"{of_optimizer}{key}{of}: {left!r} by the checkpoint's schedules, {now!r} by this "
                    f"trainer's at this step; the run continues with {now!r}"
                )


def put_values(groups: Sequence[dict[str, Any]], values: Sequence[Mapping[str, Any]], keys: set[str]) -> None:
    """Write values into param groups; a tensor is filled in place, as a compiled step holds it."""
    for group, given in zip(groups, values, strict=True):
        for key in keys & group.keys():
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(given[key])
            else:
                group[key] = given[key]


def with_arguments(saved: Mapping[str, Any], built: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved state of a scheduler with the arguments of the `built` state."""
    merged = dict(saved)
    for key, value in built.items():
        if key not in saved or (key in PROGRESS and key != "base_lrs"):
            continue
        if key == "scheduler":  # of a window; None before the window begins
            merged[key] = saved[key] and with_arguments(saved[key], value)
        elif key == "_schedulers":
            merged[key] = [with_arguments(*pair) for pair in zip(saved[key], value, strict=True)]
        else:
            merged[key] = value
    return merged


def check_scheduler_state(scheduler: Any, saved: Mapping[str, Any], what: str) -> None:
    """Check that a state has a step count, and values of the same kinds as the scheduler's.

    Raises:
        CheckpointError: with the key, the expected and the found value.
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


def optimizers_at_zero(trainer: ResumableTrainer) -> list[str]:
    """Return the names of the optimizers whose rate is 0, was not always, and stays 0 by their schedules."""
    left = (
        LOOKAHEAD_STEPS
        if trainer.max_iters is None
        else min(LOOKAHEAD_STEPS, trainer.max_iters - trainer.iter)
    )
    found = []
    for name, optimizer in named_optimizers(trainer.optimizer).items():
        numbers = own_schedulers(trainer, optimizer)
        still = [i for i, group in enumerate(optimizer.param_groups) if _has_stopped(group)]
        if numbers and still and left > 0:
            schedulers = [trainer.schedulers[number] for number in numbers]
            if not _revives(
                [s for s in schedulers if not _follows_metric(s)], optimizer.param_groups, still, left
            ):
                found.append(name)
    return found


def too_short(
    trainer: ResumableTrainer, number: int, state: Mapping[str, Any], meta: Mapping[str, Any]
) -> str | None:
    """Return why a OneCycleLR ends before the run, which was made longer, or None.

    OneCycleLR raises an error after its last step.
    """
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
    except Exception:  # an object of the user's, which no schedule reads
        return value


def _steps_done(state: Mapping[str, Any]) -> int:
    """Return the number of steps that a scheduler has made; a ChainedScheduler only has it in its parts."""
    if "last_step" in state:
        return int(state["last_step"])
    return int(state["last_epoch"]) if "last_epoch" in state else _steps_done(state["_schedulers"][0])


def _steps_to_make(saved: Mapping[str, Any], built: Mapping[str, Any], meta: Mapping[str, Any]) -> int:
    """Return the number of steps of a saved scheduler, in the unit of the built one."""
    if "by_epoch" in built and built["by_epoch"] != saved["by_epoch"]:
        return int(meta["epoch" if built["by_epoch"] else "iter"])
    return _steps_done(saved)


def _follows_metric(scheduler: Any) -> bool:
    return isinstance(scheduler, PlateauWindow | ReduceLROnPlateau)


def _counts_steps_alone(scheduler: Any) -> bool:
    """Return whether the values of a scheduler follow from the number of its steps."""
    if _follows_metric(scheduler):
        return False
    own = type(scheduler).__module__.startswith("torch.") or isinstance(scheduler, Window)
    return own and all(map(_counts_steps_alone, getattr(scheduler, "_schedulers", ())))


@contextmanager
def _copies(
    schedulers: Sequence[Any], states: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[list[Any], _StandIn]]:
    """Yield copies of schedulers in given states, on a stand-in for their optimizer."""
    stand_in = _StandIn(groups)
    with warnings.catch_warnings():  # PyTorch warns of steps without an optimizer's step
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
    """Make the steps of each scheduler in the order of a training.

    Schedulers with the most steps are stepped in each iteration; the others, which count epochs, at the end
    of each epoch.
    """
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
    """Return whether one of the rates of 0 changes within some steps; True if that cannot be computed."""
    try:
        states = [scheduler.state_dict() for scheduler in schedulers]
        with _copies(schedulers, states, [without_parameters(group) for group in groups]) as (
            copies,
            stand_in,
        ):
            for _ in range(left):
                for each in copies:
                    each.step()
                if any(float(stand_in.param_groups[i]["lr"]) for i in still):
                    return True
    except Exception:  # a scheduler of the user's, which cannot be copied or ends here
        return True
    return False


def _close(a: Any, b: Any) -> bool:
    """Return whether two values differ only by rounding; Adam's `betas` are two numbers."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_close, a, b))
    return math.isclose(float(a), float(b), rel_tol=1e-9)
