"""Step PyTorch's schedulers in half the time of `step()`, with the same values.

ParamSchedulerHook, the windows and the resume use it. `LRScheduler.step()` checks the order of calls, which
can only be wrong in the first step, and copies tensors, although a rate is seldom a tensor; that takes longer
than the schedule itself (`benchmarks.hook_cost`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

_STEP = [getattr(LRScheduler, name, None) for name in ("step", "_update_lr")]
_MARKS = ("_get_lr_called_within_step", "_step_count", "_last_lr")


def steps_plainly(scheduler: object) -> bool:
    """Return whether a scheduler's `step` is PyTorch's own, so that `next_values` may replace it."""
    # not by `vars`: an object whose dict was asked for is slower from then on (CPython 3.11, 3.12)
    own = [getattr(type(scheduler), name, None) for name in ("step", "_update_lr")]
    unpatched = getattr(getattr(scheduler, "step", None), "__func__", None) is LRScheduler.step
    return own == _STEP and unpatched and all(hasattr(scheduler, mark) for mark in _MARKS)


def next_values(scheduler: LRScheduler) -> list[Any]:
    """Count a step, and return the value of each param group after it, from PyTorch's `get_lr()`.

    Nothing is written to the groups. Their values must be floats.
    """
    scheduler._step_count += 1  # first, as PyTorch does: its cosine looks at it
    scheduler._get_lr_called_within_step = True
    try:
        scheduler.last_epoch += 1
        values = [*scheduler.get_lr()]
    finally:
        scheduler._get_lr_called_within_step = False
    if len(values) != (expected := len(scheduler.optimizer.param_groups)):
        raise ValueError(
            f"{type(scheduler).__name__}.get_lr() must return one value per param group, {expected}, got "
            f"{len(values)}"
        )
    scheduler._last_lr = values
    return values


def stepper(scheduler: Any) -> Callable[[], object]:
    """Return a function that steps a scheduler.

    It takes the fast step if the scheduler's `step` is PyTorch's own, and calls `step` otherwise.
    """
    return partial(_step, scheduler) if steps_plainly(scheduler) else scheduler.step


def _step(scheduler: LRScheduler) -> None:
    groups = scheduler.optimizer.param_groups
    # PyTorch warns of a wrong order in its first step; releases differ in how they treat groups added later
    if scheduler._step_count < 2 or len(groups) != len(scheduler.base_lrs):
        scheduler.step()
        return
    for group in groups:
        if type(group["lr"]) is not float:
            scheduler.step()
            return
    values = next_values(scheduler)
    for index, group in enumerate(groups):  # zip(strict=True) takes 0.3 us
        group["lr"] = values[index]
