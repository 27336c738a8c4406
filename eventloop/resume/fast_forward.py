"""Step the schedules of a trainer to the step of a checkpoint.

`Applying` uses it for schedules whose arguments differ from those in the checkpoint. PyTorch's schedules
multiply the last rate, so a rate of 0 would stay 0 whatever the new arguments are. Such schedules therefore
begin again, and make as many steps as the checkpoint's schedules made. The rates are then those of the new
arguments.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from eventloop.optim.param_groups import deep_copied
from eventloop.optim.windows import PROGRESS, PlateauWindow, Window

_OF_GROUPS = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums", "floor"}
)
"""The keys of schedulers' states whose values are lists with an item for each param group."""


def follows_metric(scheduler: Any) -> bool:
    """Return whether a scheduler's values depend on scores, which a checkpoint does not hold."""
    return isinstance(scheduler, PlateauWindow | ReduceLROnPlateau)


def fast_forward(
    schedulers: Sequence[Any],
    built: Sequence[Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    meta: Mapping[str, Any],
) -> None:
    """Reset schedulers to their first step, and step them as often as the checkpoint's were stepped.

    The param groups of their optimizer must have the values with which the schedulers were built.

    Args:
        schedulers: all schedulers of one optimizer.
        built: the states of the schedulers when they were built.
        saved: the states of the schedulers in the checkpoint.
        meta: the `meta` of the checkpoint, whose counters give the order of the schedulers' steps.
    """
    counts = [  # how often each scheduler is stepped
        _steps_to_make(former, begun, meta) - _steps_done(begun)
        for former, begun in zip(saved, built, strict=True)
    ]
    for scheduler, begun in zip(schedulers, built, strict=True):
        state = copy.deepcopy(dict(begun))
        if isinstance(scheduler, Window) and state["begin"] > state["last_step"]:
            state["scheduler"] = None  # the window makes its inner scheduler when it begins
        scheduler.load_state_dict(state)
    epochs = meta["epoch"]
    position = meta["position"]
    iters_of_this_epoch = -(-position["batch_idx"] // position.get("batches_per_iter", 1))  # rounded up
    iters_an_epoch = (meta["iter"] - iters_of_this_epoch) / epochs if epochs else math.inf
    with warnings.catch_warnings():  # PyTorch warns of a scheduler's step without an optimizer's step
        warnings.simplefilter("ignore")
        _step_all(schedulers, counts, iters_an_epoch)


def _step_all(schedulers: Sequence[Any], counts: Sequence[int], iters_an_epoch: float) -> None:
    """Step each scheduler as often as `counts` says, in the order of a training.

    The order matters because schedulers multiply the same rate. Those with the most steps are stepped in each
    iteration, the others at the end of each epoch, and all steps are made by the last iteration.

    Args:
        counts: the number of steps of each scheduler.
        iters_an_epoch: the mean number of iterations in an epoch; infinite within the first one.
    """
    made, iterations = [0] * len(counts), max(counts)
    most_first = sorted(enumerate(schedulers), key=lambda pair: -counts[pair[0]])
    for done in range(1, iterations + 1):
        for index, scheduler in most_first:
            count = counts[index]
            if done == iterations:
                due = count
            else:
                due = done if count == iterations else min(count, int(done / iters_an_epoch))
            while made[index] < due:
                scheduler.step()
                made[index] += 1


def _steps_done(state: Mapping[str, Any]) -> int:
    """Return the number of steps that a scheduler has made; in a chain its first scheduler has it."""
    if "last_step" in state:  # of a Window
        return int(state["last_step"])
    return int(state["last_epoch"]) if "last_epoch" in state else _steps_done(state["_schedulers"][0])


def _steps_to_make(saved: Mapping[str, Any], built: Mapping[str, Any], meta: Mapping[str, Any]) -> int:
    """Return the number of steps after which a scheduler is as far as the checkpoint's was.

    If the scheduler counts epochs and the checkpoint's counted iterations, this is the number of completed
    epochs; if it is the other way round, the number of completed iterations.

    Args:
        saved, built: the scheduler's state in the checkpoint, and its state when this trainer was built.
        meta: the `meta` of the checkpoint, with its counters.
    """
    if "by_epoch" in built and built["by_epoch"] != saved["by_epoch"]:
        return int(meta["epoch" if built["by_epoch"] else "iter"])
    return _steps_done(saved)


def keys_of(scheduler: Any) -> set[str]:
    """Return the keys of the values in param groups that a scheduler writes, such as {"lr"}."""
    name = getattr(scheduler, "param_name", "lr")
    keys = {name, "betas"} if name == "momentum" else {name}  # of Adam the momentum is the first of the betas
    if getattr(scheduler, "cycle_momentum", False):
        keys |= {"momentum", "betas"}
    for inner in getattr(scheduler, "_schedulers", ()):
        keys |= keys_of(inner)
    return keys


def changed_values(
    name: str,
    former: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    keys: set[str],
    listed: Collection[tuple[str, int, str] | None],
    new: Collection[int] = (),
) -> Iterator[str]:
    """Yield a log line for each scheduled value that differs from the checkpoint's.

    Args:
        name: the name of the optimizer; "" if there is a single one.
        former: the param groups with the checkpoint's values.
        groups: the param groups with this trainer's values.
        keys: the keys of the scheduled values in the param groups.
        listed: the values for which another line is logged, each as the optimizer's name, the index of the
            group, and the key. A None among them has no meaning.
        new: the indices of the groups that the checkpoint does not have.
    """
    of_optimizer = f"{name} " if name else ""
    for number, (saved, present) in enumerate(zip(former, groups, strict=True)):
        of = f" of param group {number}" if len(groups) > 1 else ""
        for key in sorted(keys & saved.keys()):
            if (name, number, key) not in listed and not _close(saved[key], present[key]):
                was, now = (
                    v.item() if isinstance(v, torch.Tensor) else v for v in (saved[key], present[key])
                )
                source = "in this trainer" if number in new else "by the checkpoint's schedules"
                yield (
                    f"{of_optimizer}{key}{of}: {was!r} {source}, {now!r} by this trainer's schedules at this "
                    f"step; the run continues with {now!r}"
                )


def restore_former(
    schedulers: Sequence[Any],
    loaded: Sequence[Mapping[str, Any]],
    groups: Sequence[dict[str, Any]],
    former: Sequence[Mapping[str, Any]],
    new: Collection[int],
) -> None:
    """Restore the checkpoint's values in schedulers and param groups, except in new groups.

    Args:
        schedulers: the schedulers of an optimizer, stepped to the step of the checkpoint.
        loaded: the states of the schedulers in the checkpoint.
        groups: the param groups.
        former: the values of the param groups in the checkpoint.
        new: the indices of the groups that the checkpoint does not have.
    """
    sources = [None if index in new else index for index in range(len(groups))]
    for scheduler, state in zip(schedulers, loaded, strict=True):
        scheduler.load_state_dict(by_group(state, scheduler.state_dict(), sources, len(groups)))
    keys: set[str] = set().union(*map(keys_of, schedulers))
    saved = [index for index in sources if index is not None]
    put_values([groups[index] for index in saved], [former[index] for index in saved], keys)


def put_values(groups: Sequence[dict[str, Any]], values: Sequence[Mapping[str, Any]], keys: set[str]) -> None:
    """Write the values of `keys` into param groups; fill a tensor in place, as compiled code refers to it."""
    for group, given in zip(groups, values, strict=True):
        for key in keys & given.keys():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(given[key])
            else:
                group[key] = deep_copied(given[key])


def with_arguments(saved: Mapping[str, Any], built: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scheduler's saved state with the arguments of this trainer's scheduler.

    Args:
        saved: the state in the checkpoint, from which the progress is kept.
        built: the state of this trainer's scheduler when it was built, which has the arguments.
    """
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


def _close(a: Any, b: Any) -> bool:
    """Return whether two values differ only by rounding; compare pairs, as Adam's `betas`, item by item."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_close, a, b))
    return math.isclose(float(a), float(b), rel_tol=1e-9)


def by_group(saved: Any, own: Any, places: Sequence[int | None], number: int) -> Any:
    """Return a scheduler's state with its lists of values in the order of the trainer's param groups.

    Args:
        saved: the state in the checkpoint.
        own: the state of the trainer's scheduler, which has the values of groups that are new.
        places: for each param group of the trainer its index in the checkpoint; None for a new group.
        number: the number of groups in the checkpoint.
    """
    if isinstance(saved, Mapping):
        inner = own if isinstance(own, Mapping) else {}
        return {
            key: _values(value, inner.get(key), places)
            if key in _OF_GROUPS and isinstance(value, list | tuple) and len(value) == number
            else by_group(value, inner.get(key), places, number)
            for key, value in saved.items()
        }
    if isinstance(saved, list) and saved and isinstance(saved[0], Mapping):
        parts = own if isinstance(own, list) and len(own) == len(saved) else [None] * len(saved)
        return [by_group(part, other, places, number) for part, other in zip(saved, parts, strict=True)]
    return saved


def _values(saved: Sequence[Any], own: Any, places: Sequence[int | None]) -> list[Any]:
    """Return a list of values in the order of the trainer's param groups; see `by_group`."""
    return [own[i] if place is None else saved[place] for i, place in enumerate(places)]
