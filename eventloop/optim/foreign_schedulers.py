"""Refuse schedulers that are not stepped as PyTorch's, such as timm's and Keras', and say what to write."""

from __future__ import annotations

import inspect
from inspect import Parameter
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau


def refuse_needed_arguments(scheduler: Any) -> None:
    """Refuse a scheduler whose `step` cannot be called without an argument, as PyTorch's are.

    Handlers need no state for a resume: a checkpoint has the rates, and timm computes the next ones from the
    epoch or the number of updates alone. Its scheduler on plateau has a state, and gets no handler.

    Raises:
        TypeError: see above; the message has the handlers to write.
    """
    try:
        parameters = inspect.signature(scheduler.step).parameters.values()
    except ValueError:  # of a builtin
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
    """Refuse an object without a `step`; a function of the step, as Keras' schedules are, has a counterpart.

    Raises:
        TypeError: see above; the message has the scheduler to write.
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
    """Return the handlers that step a scheduler, as lines of code.

    The rate of an epoch is set before it, because an epoch that a stop cuts short has an `after_train_epoch`
    too, and goes on when it is resumed.
    """
    handlers = {"before_train_epoch": ("step_by_epoch", "step(event.epoch)")}
    if callable(getattr(scheduler, "step_update", None)):
        handlers["after_train_iter"] = "step_by_iter", "step_update(event.iter + 1)"
    return "".join(
        f'\n  @trainer.bus.on("{event}", priority=70)\n  def {name}(trainer, event): scheduler.{call}'
        for event, (name, call) in handlers.items()
    )
