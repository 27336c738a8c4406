"""Find hooks that run after a hook that saves checkpoints, so that the checkpoint lacks their changes.

`CheckpointHook` and `EMAHook` call these functions when the trainer is built.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

from eventloop.events.priority import get_priority
from eventloop.hooks.hook import Hook, priority_of
from eventloop.hooks.param_scheduler import ParamSchedulerHook
from eventloop.hooks.sync_buffers import SyncBuffersHook

logger = logging.getLogger("eventloop")


def refuse_late_average(average: Hook, savings: Sequence[Hook], hooks: Sequence[Any]) -> None:
    """Refuse a hook that updates an average after one of `savings` may have saved it in the same event.

    Args:
        average: the hook that keeps the average.
        savings: the hooks that save checkpoints.
        hooks: all hooks of a trainer, in the order of their subscription.

    Raises:
        ValueError: naming the priorities of both hooks.
    """
    for event in ("after_train_iter", "after_train_epoch"):
        for saving in savings:
            if priorities := _late_priorities(average, saving, event, hooks):
                late, early = priorities
                raise ValueError(
                    f"{type(average).__name__} has priority {late} in {event}, after "
                    f"{type(saving).__name__} ({early}): a checkpoint would lack the last update, and a "
                    f"resumed run would average other weights; give it a priority below {early}"
                )


def warn_of_late_hooks(saving: Hook, event: str, hooks: Sequence[Any]) -> None:
    """Log a warning for each hook that changes saved state in an event after the hook `saving` has saved.

    It is no error, because the order may be intended.
    """
    for hook in hooks:
        saves_too = isinstance(hook, type(saving)) or isinstance(saving, type(hook))
        if saves_too or not _changes_saved_state(hook):
            continue
        if priorities := _late_priorities(hook, saving, event, hooks):
            late, early = priorities
            logger.warning(
                "%s has priority %d in %s, after %s (%d), which saves there: its changes are missing from "
                "that checkpoint, and a resumed run would go on without them; give it a priority below %d",
                type(hook).__name__,
                late,
                event,
                type(saving).__name__,
                early,
                early,
            )


def _late_priorities(hook: Any, other: Any, event: str, hooks: Sequence[Any]) -> tuple[int, int] | None:
    """Return the priorities of `hook` and `other` if `hook` handles the event after `other`, else None."""
    late, early = _priority_in(hook, event), _priority_in(other, event)
    if late is None or early is None:
        return None
    runs_after = (late, hooks.index(hook)) > (early, hooks.index(other))
    return (late, early) if runs_after else None


def _priority_in(hook: Any, event: str) -> int | None:
    """Return the priority of a hook's synchronous method for an event; None if it has no such method."""
    for name, events in hook._points.items() if isinstance(hook, Hook) else ():
        if event in events and not inspect.iscoroutinefunction(method := getattr(hook, name)):
            return get_priority(priority_of(hook, method))
    return None


def _changes_saved_state(hook: Any) -> bool:
    """Return whether a hook changes weights, optimizers, schedulers, or a state of its own."""
    if isinstance(hook, ParamSchedulerHook | SyncBuffersHook):
        return True
    return isinstance(hook, Hook) and (hook.stateful or bool(hook.runs_phases))
