"""Refuse schedulers that are stepped with an argument, such as timm's, and say which handlers to write."""

from __future__ import annotations

import inspect
from inspect import Parameter
from typing import Any


def refuse_needed_arguments(scheduler: Any) -> None:
    """Refuse a scheduler whose `step` cannot be called without an argument, as PyTorch's are.

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
    raise TypeError(
        f"schedulers: {type(scheduler).__name__}.step needs {' and '.join(needed)}, and the hook "
        "param_scheduler calls step() without one: leave it out of schedulers=[...], and step "
        f"it yourself:{_handlers(scheduler)}"
    )


def _handlers(scheduler: Any) -> str:
    """Return the handlers that step a scheduler, as lines of code."""
    calls = {"epoch": "step(event.epoch + 1)"}
    if callable(getattr(scheduler, "step_update", None)):
        calls["iter"] = "step_update(event.iter + 1)"
    return "".join(
        f'\n  @trainer.bus.on("after_train_{unit}", priority=70)'
        f"\n  def step_by_{unit}(trainer, event): scheduler.{call}"
        for unit, call in calls.items()
    )
