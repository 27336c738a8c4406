"""Refuse schedulers that are not stepped like PyTorch's, and find lengths that are in the wrong unit.

`ParamSchedulerHook` uses it, and logs the warnings. Schedulers of timm and Keras are refused by an error with
the code to write instead. A length is in epochs or iterations, and with accumulated gradients an iteration is
a batch or an update of the weights. PyTorch's schedulers do not know their unit:
`CosineAnnealingLR(optimizer, T_max=epochs)` that is stepped after each iteration goes up and down once every
few batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from inspect import Parameter
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from eventloop.optim.windows import Window

_BY_EPOCH = (
    "default_hooks=dict(param_scheduler=ParamSchedulerHook(by_epoch=True)), or scheduler.by_epoch = True"
)
_NOTHING = 1e-6
"""A factor of the learning rate below which a model practically does not learn any more."""


def refuse_needed_arguments(scheduler: Any) -> None:
    """Refuse a scheduler whose `step` cannot be called without an argument, as the hook calls it.

    The message has handlers that step a scheduler of timm instead. These need no state for a resume, because
    timm computes a rate from the number of epochs or updates alone. Its scheduler on plateau has a state, so
    the message names PyTorch's in its place.

    Raises:
        TypeError: the scheduler is refused.
    """
    try:
        parameters = inspect.signature(scheduler.step).parameters.values()
    except ValueError:  # a builtin function has no signature
        return
    various = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is Parameter.empty and p.kind not in various]
    if not needed:
        return
    if isinstance(getattr(scheduler, "lr_scheduler", None), ReduceLROnPlateau):
        raise TypeError(
            f"schedulers: {type(scheduler).__name__}.step needs {' and '.join(needed)} and a metric: pass "
            "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), which the hook param_scheduler steps "
            "with the metric of its monitor=..., and whose state a checkpoint has"
        )
    raise TypeError(
        f"schedulers: {type(scheduler).__name__}.step needs {' and '.join(needed)}, and the hook "
        "param_scheduler calls step() without one: leave it out of schedulers=[...], and step "
        f"it yourself:{_handlers(scheduler)}"
    )


def refuse_without_step(scheduler: Any) -> None:
    """Refuse an object without a method `step`.

    Raises:
        TypeError: the object is refused. If it is a function of the step, as Keras' schedules are, the
            message has the scheduler of PyTorch to write.
    """
    if callable(getattr(scheduler, "step", None)):
        return
    if callable(scheduler):
        raise TypeError(
            f"schedulers must be PyTorch schedulers with a step(), got {scheduler!r}"
            ", a function of the step, as Keras' schedules are: build the optimizer with lr=1.0, and pass "
            "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: float(schedule(i)))"
        )
    raise TypeError(f"schedulers must be PyTorch schedulers with a step(), got {scheduler!r}")


def _handlers(scheduler: Any) -> str:
    """Return the handlers that step a scheduler of timm, as lines of code.

    The rate of an epoch is set before the epoch. A handler of `after_train_epoch` would set it too early if a
    stop ends an epoch early: that event is emitted then, and a resumed run continues the epoch.
    """
    handlers = {"before_train_epoch": ("step_by_epoch", "step(event.epoch)")}
    if callable(getattr(scheduler, "step_update", None)):
        handlers["after_train_iter"] = "step_by_iter", "step_update(event.iter + 1)"
    return "".join(
        f'\n  @trainer.bus.on("{event}", priority=70)\n  def {name}(trainer, event): scheduler.{call}'
        for event, (name, call) in handlers.items()
    )


def mistaken_unit(scheduler: Any, by_epoch: bool, max_epochs: int, max_iters: int | None) -> str | None:
    """Return a warning if a schedule seems to be written in another unit than it is stepped in, else None.

    It seems so if its length equals the run's length in the other unit, or if it ends in the first tenth of
    the iterations.

    Args:
        scheduler: the scheduler.
        by_epoch: True if it is stepped after each epoch, False after each iteration.
        max_epochs, max_iters: the length of the run in both units; without `max_iters` the iterations are
            assumed to outnumber the epochs.
    """
    in_other_unit = max_iters if by_epoch else max_epochs
    names = [name for name, length in _lengths(_state(scheduler)) if length == in_other_unit]
    if not (names or by_epoch or max_iters is None):
        return _lowers_at_once(scheduler, max_epochs, max_iters)
    if not names or in_other_unit is None or max_iters == max_epochs:
        return None
    name, label = type(scheduler).__name__, f"{names[0]}={in_other_unit}"
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
    """Return a warning if a schedule lowers the rate in a small part of the run, else None.

    It is stepped after each iteration, and was probably written for a step after each epoch.
    """
    name, state = type(scheduler).__name__, _state(scheduler)
    by_epoch = "step it by epoch with " + ("by_epoch=True" if isinstance(scheduler, Window) else _BY_EPOCH)
    while isinstance(state, Mapping) and state.get("scheduler"):  # the state of a window
        state = state["scheduler"]
    if not isinstance(state, Mapping) or "total_size" in state:  # of a user's class, or of a CyclicLR
        return None
    gamma, step, milestones = state.get("gamma"), state.get("step_size", 1), state.get("milestones")
    if not all(isinstance(each, int) for each in (step, *(milestones or ()))):  # the state of a user's class
        return None
    if milestones and max(milestones) <= max_epochs <= max_iters / 10:
        return (
            f"{name} is stepped after each iteration, and its last milestone, {max(milestones)}, is in the "
            f"first tenth of {max_iters} iterations, as if it were one of {max_epochs} epochs: {by_epoch}"
        )
    if milestones or not (isinstance(gamma, float) and 0 < gamma < 1):
        return None
    # the factors of the rate after a tenth of the run, after the run, and after as many steps as epochs
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
    """Return a warning if a schedule seems to count batches where an iteration is an update, else None.

    It also does so if a schedule seems to count updates where an iteration is a batch. The schedule is then
    as long as the run in the other unit. Milestones in batches are recognised as well if the last one is
    after the last update, but not after the last batch.

    Args:
        scheduler: a scheduler that is stepped after each iteration.
        per_step: the number of batches for an update, which is an optimizer step.
        batches: the number of batches in the run.
        updates: the numbers of updates in the run that a user may compute: with a new update at the begin of
            each epoch, and without.
        by_update: whether an iteration is an update, not a batch.
    """
    own, others = ({*updates}, {batches}) if by_update else ({batches}, {*updates})
    state = _state(scheduler)
    mistaken = [(name, n) for name, n in (*_lengths(state), *_ends(state)) if n in others - own]
    if not mistaken:
        return _beyond_updates(scheduler, per_step, batches, max(updates)) if by_update else None
    name, label = type(scheduler).__name__, f"{mistaken[0][0]}={mistaken[0][1]}"
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


def _beyond_updates(scheduler: Any, per_step: int, batches: int, updates: int) -> str | None:
    """Return a warning if the last milestone is after the last update, but not after the last batch."""
    state = _state(scheduler)
    while isinstance(state, Mapping) and state.get("scheduler"):  # the state of a window
        state = state["scheduler"]
    milestones = isinstance(state, Mapping) and state.get("milestones")
    if not milestones or not all(isinstance(each, int) for each in milestones):  # the state of a user's class
        return None
    if not updates < (last := max(milestones)) <= batches:
        return None
    return (
        f'{type(scheduler).__name__} is stepped after each update, an iteration with unit="update", and its '
        f"last milestone, {last}, is after the run's {updates} updates, but within its {batches} batches, "
        f"{per_step} for an update: give it the milestones in updates"
    )


def _state(scheduler: Any) -> Any:
    """Return the state of a scheduler; of a window the one that has all arguments.

    The schedules of Transformers are functions in a `LambdaLR`, partials with the length
    `num_training_steps`. The state has no functions, so the length is added.
    """
    read: Callable[[], Any] = getattr(scheduler, "built_state", getattr(scheduler, "state_dict", dict))
    state = read()
    if not (isinstance(scheduler, LambdaLR) and isinstance(state, Mapping)):
        return state
    keywords = [each.keywords for each in scheduler.lr_lambdas if isinstance(each, partial)]
    lengths = [each["num_training_steps"] for each in keywords if "num_training_steps" in each]
    return {**state, "num_training_steps": lengths[0]} if lengths else state


def _ends(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the steps in a scheduler's state at which a schedule ends.

    These are the end of a window, the last milestone, and the length of a sequence of schedulers.
    """
    if not isinstance(state, Mapping):  # the state of a user's class
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
    if not isinstance(state, Mapping):  # the state of a user's class
        return
    if state.get("scheduler"):  # the state of a window
        yield from _lengths(state["scheduler"])
    elif "_schedulers" in state:  # a SequentialLR ends with its last part
        for part in state["_schedulers"][-1:] if "_milestones" in state else state["_schedulers"]:
            yield from _lengths(part)
    else:
        lowers = "power" in state or state.get("end_factor", 1) < state.get("start_factor", 0)
        for name in ("T_max", "total_steps", "num_training_steps", "T_0", *(["total_iters"] * lowers)):
            if name in state:
                yield name, state[name]
