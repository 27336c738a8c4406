"""Find schedules whose length is given in another unit than that in which they are stepped.

The units are epochs and iterations, and with accumulated gradients batches and updates. The
ParamSchedulerHook logs the warnings. PyTorch's schedulers do not know their unit:
`CosineAnnealingLR(optimizer, T_max=epochs)` that is stepped after each iteration goes up and down once every
few batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from eventloop.optim.windows import Window

_BY_EPOCH = (
    "default_hooks=dict(param_scheduler=ParamSchedulerHook(by_epoch=True)), or scheduler.by_epoch = True"
)
_NOTHING = 1e-6
"""The share of a learning rate with which a model does not learn any more."""


def mistaken_unit(scheduler: Any, by_epoch: bool, max_epochs: int, max_iters: int | None) -> str | None:
    """Return a warning if a schedule seems to count the wrong unit, else None.

    Its length equals the run's length in that unit, or it ends in the first tenth of the iterations.

    Args:
        scheduler: the scheduler.
        by_epoch: True if it is stepped after each epoch, False after each iteration.
        max_epochs, max_iters: the length of the run in both units; without `max_iters` the iterations are
            assumed to outnumber the epochs.
    """
    mistaken = max_iters if by_epoch else max_epochs
    names = [name for name, length in _lengths(_state(scheduler)) if length == mistaken]
    if not (names or by_epoch or max_iters is None):
        return _lowers_at_once(scheduler, max_epochs, max_iters)
    if not names or mistaken is None or max_iters == max_epochs:
        return None
    name, label = type(scheduler).__name__, f"{names[0]}={mistaken}"
    if by_epoch:
        return (
            f"{name} is stepped after each epoch, and its {label} is the number of iterations of a run of "
            f"max_epochs={max_epochs}: give it by_epoch=False, or the length in epochs"
        )
    how = "by_epoch=True" if isinstance(scheduler, Window) else _BY_EPOCH
    length = "" if max_iters is None else f", {max_iters}"
    return (
        f"{name} is stepped after each iteration, and its {label} looks like a number of epochs, of "
        f"max_epochs={max_epochs}: step it by epoch with {how}; or give it the length in iterations{length}"
    )


def _lowers_at_once(scheduler: Any, max_epochs: int, max_iters: int) -> str | None:
    """Return a warning if a schedule that is stepped after each iteration lowers the rate as if by epoch."""
    name, state = type(scheduler).__name__, _state(scheduler)
    by_epoch = "step it by epoch with " + ("by_epoch=True" if isinstance(scheduler, Window) else _BY_EPOCH)
    while isinstance(state, Mapping) and state.get("scheduler"):  # of a window
        state = state["scheduler"]
    if not isinstance(state, Mapping) or "total_size" in state:  # of the user's own class, a CyclicLR
        return None
    gamma, step, milestones = state.get("gamma"), state.get("step_size", 1), state.get("milestones")
    if not all(isinstance(each, int) for each in (step, *(milestones or ()))):  # of the user's own class
        return None
    if milestones and max(milestones) <= max_epochs <= max_iters / 10:
        return (
            f"{name} is stepped after each iteration, and its last milestone, {max(milestones)}, is in the "
            f"first tenth of {max_iters} iterations, as if it were one of {max_epochs} epochs: {by_epoch}"
        )
    if milestones or not (isinstance(gamma, float) and 0 < gamma < 1):
        return None
    early, end, of_epochs = (gamma ** (n // step) for n in (max_iters // 10, max_iters, max_epochs))
    if not (early < _NOTHING or end < _NOTHING <= of_epochs):
        return None
    sizes = f"step_size={step}, gamma={gamma}" if "step_size" in state else f"gamma={gamma}"
    return (
        f"{name} is stepped after each iteration, and its {sizes} multiplies the rate by {end:.1e} in "
        f"{max_iters} iterations, and by {of_epochs:.1e} in {max_epochs} epochs: {by_epoch}"
    )


def mistaken_count(
    scheduler: Any, per_step: int, batches: int, updates: Collection[int], *, by_update: bool
) -> str | None:
    """Return a warning if a schedule has the run's length in batches, and counts updates, or vice versa.

    Args:
        scheduler: a scheduler that is stepped after each iteration.
        per_step: the number of batches for an update, an optimizer step.
        batches: the number of batches of the run.
        updates: the number of updates, if each epoch begins with a new one and if it does not.
        by_update: whether an iteration is an update, not a batch.
    """
    own, others = ({*updates}, {batches}) if by_update else ({batches}, {*updates})
    state = _state(scheduler)
    found = [(name, n) for name, n in (*_lengths(state), *_ends(state)) if n in others - own]
    if not found:
        return None
    name, label = type(scheduler).__name__, f"{found[0][0]}={found[0][1]}"
    if by_update:
        return (
            f'{name} is stepped after each update, an iteration with unit="update", and its {label} is the '
            f"number of batches of the run, {per_step} for an update: give it the length in updates, "
            f"{min(own)}"
        )
    return (
        f"{name} is stepped after each batch, and its {label} is the number of updates of the run, with "
        f'cumulative_iters={per_step}: count updates everywhere, with Trainer(unit="update"), or give it the '
        f"length in batches, {batches}"
    )


def _state(scheduler: Any) -> Any:
    read: Callable[[], Any] = getattr(scheduler, "built_state", getattr(scheduler, "state_dict", dict))
    return read()


def _ends(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of the end of a window, of the last milestone and of a sequence in a state."""
    if not isinstance(state, Mapping):  # of a class of the user's own
        return
    yield "end", state.get("end")
    for name in ("milestones", "_milestones"):
        if milestones := state.get(name):
            yield f"last of {name.lstrip('_')}", max(milestones)
    if state.get("_schedulers") and (milestones := state.get("_milestones")):  # a SequentialLR
        for _, length in _lengths(state["_schedulers"][-1]):
            yield "length of all parts", max(milestones) + length
    yield from _ends(state.get("scheduler"))


def _lengths(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the arguments in a scheduler's state that are lengths.

    A warm-up has none, because it is a small part of a run in any unit.
    """
    if not isinstance(state, Mapping):  # of a class of the user's own
        return
    if state.get("scheduler"):  # of a window
        yield from _lengths(state["scheduler"])
    elif "_schedulers" in state:  # a SequentialLR ends with its last part
        for part in state["_schedulers"][-1:] if "_milestones" in state else state["_schedulers"]:
            yield from _lengths(part)
    else:
        lowers = "power" in state or state.get("end_factor", 1) < state.get("start_factor", 0)
        for name in ("T_max", "total_steps", "T_0", *(["total_iters"] * lowers)):
            if name in state:
                yield name, state[name]
