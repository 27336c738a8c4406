"""Find schedules whose length is given in epochs where they are stepped by iteration, or vice versa.

The ParamSchedulerHook logs the warnings. PyTorch's schedulers do not know their unit:
`CosineAnnealingLR(optimizer, T_max=epochs)` that is stepped after each iteration goes up and down once every
few batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from eventloop.optim.windows import Window

_LENGTHS = ("T_max", "total_steps", "T_0")
_VANISHED = 1e-6
"""The part of a rate below which nothing is trained: a step_size that leads there was meant by epoch."""

_BY_EPOCH = (
    "default_hooks=dict(param_scheduler=ParamSchedulerHook(by_epoch=True)), or scheduler.by_epoch = True"
)


class Horizon(NamedTuple):
    """A number of steps in the arguments of a schedule, such as its length or its last milestone.

    Args:
        label: the argument that sets it, with its value.
        step: the number of steps.
        whole: True for the length of the schedule, False for a milestone or a step_size.
    """

    label: str
    step: int
    whole: bool = True


def mistaken_unit(scheduler: Any, by_epoch: bool, max_epochs: int, max_iters: int | None) -> str | None:
    """Return a warning if a schedule's length is in another unit than its steps, else None.

    Args:
        by_epoch: True if it is stepped after each epoch, False after each iteration.
        max_epochs, max_iters: the length of the run in both units; without `max_iters` the iterations are
            assumed to be more than the epochs.
    """
    if max_iters == max_epochs:
        return None
    read: Callable[[], Any] = getattr(scheduler, "built_state", getattr(scheduler, "state_dict", dict))
    is_window = isinstance(scheduler, Window)
    for horizon in _horizons(read(), max_iters):
        if by_epoch and horizon.whole and horizon.step == max_iters:
            return (
                f"{type(scheduler).__name__} is stepped after each epoch, and its {horizon.label} is the "
                f"number of iterations, {max_iters}, of a run of max_epochs={max_epochs}: give it "
                "by_epoch=False, or the length in epochs"
            )
        early = not is_window and max_iters is not None and _ends_early(horizon, max_epochs, max_iters)
        if not by_epoch and (early or (horizon.whole and horizon.step == max_epochs)):
            how = "by_epoch=True" if is_window else _BY_EPOCH
            length = "" if max_iters is None else f", {max_iters}"
            return (
                f"{type(scheduler).__name__} is stepped after each iteration, and its {horizon.label} looks "
                f"like a number of epochs, of max_epochs={max_epochs}: step it by epoch with {how}; or give "
                f"it the length in iterations{length}"
            )
    return None


def _ends_early(horizon: Horizon, max_epochs: int, max_iters: int) -> bool:
    """Return whether a schedule fits the epochs and ends within the first tenth of the iterations.

    Milestones, of which the last is usually in the second half of a run, only need to end within the first
    half.
    """
    if not 0 < horizon.step <= max_epochs or horizon.label.startswith("T_0"):
        return False
    in_second_half = horizon.label.startswith("milestones") and horizon.step * 2 >= max_epochs
    return horizon.step * (2 if in_second_half else 10) < max_iters


def _horizons(state: Any, max_iters: int | None) -> Iterator[Horizon]:
    """Read the lengths from the state of a scheduler.

    A warm-up yields none, because it is a small part of a run in any unit.
    """
    if not isinstance(state, Mapping):  # of a class of the user's own
        return
    if state.get("scheduler"):  # of a window
        yield from _after(state["begin"], f"begin={state['begin']}", _horizons(state["scheduler"], max_iters))
    elif milestones := state.get("_milestones"):  # of a SequentialLR, which ends with its last part
        parts = _horizons(state["_schedulers"][-1], max_iters)
        yield from _after(milestones[-1], f"milestones={milestones}", parts)
    elif "_schedulers" in state:
        for part in state["_schedulers"]:
            yield from _horizons(part, max_iters)
    else:
        yield from _own(state, max_iters)


def _own(state: Mapping[str, Any], max_iters: int | None) -> Iterator[Horizon]:
    names = [name for name in _LENGTHS if name in state]
    if "total_iters" in state and (
        "power" in state or state.get("end_factor", 1) < state.get("start_factor", 0)
    ):
        names.append("total_iters")
    yield from (
        Horizon(f"{name}={state[name]}", state[name]) for name in names if isinstance(state[name], int)
    )
    if milestones := [each for each in state.get("milestones") or () if isinstance(each, int)]:
        yield Horizon(f"milestones={milestones}", max(milestones), whole=False)
    size, gamma = state.get("step_size"), state.get("gamma")
    label = f"step_size={size}"
    if "step_size" not in state and "milestones" not in state:  # ExponentialLR
        size, label = 1, f"gamma={gamma}"
    if (
        isinstance(size, int)
        and size > 0
        and max_iters
        and isinstance(gamma, float)
        and gamma ** (max_iters // size) < _VANISHED
    ):
        yield Horizon(label, size, whole=False)


def _after(step: int, label: str, horizons: Iterator[Horizon]) -> Iterator[Horizon]:
    """Yield the horizons of a schedule that begins at `step`, counted from the begin of the run.

    Those of a whole length are also yielded as they are, because users count a length in either way.

    Args:
        label: the argument that sets `step`, with its value.
        horizons: those of the schedule itself, counted from its own begin.
    """
    for horizon in horizons:
        if step:
            yield horizon._replace(label=f"{label} and {horizon.label}", step=step + horizon.step)
        if horizon.whole or not step:
            yield horizon
