"""Find hooks that change state after a checkpoint is saved, so that the checkpoint lacks their changes.

`CheckpointHook` and `EMAHook` call them when the trainer is built.
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
    """Refuse an average that is updated after one of `savings` may have saved it in the same event.

    Args:
        average: the hook that keeps the average.
        savings: the hooks that save checkpoints.
        hooks: all hooks of a trainer, in the order of their subscription.
    """
    for event in ("after_train_iter", "after_train_epoch"):
        for saving in savings:
            if places := _runs_after(average, saving, event, hooks):
                raise ValueError(
                    f"{type(average).__name__} has priority {places[0]} in {event}, after "
                    f"{type(saving).__name__} ({places[1]}): a checkpoint would lack the last update, and a "
                    f"resumed run would average other weights; give it a priority below {places[1]}"
                )


def warn_of_late_hooks(saving: Hook, event: str, hooks: Sequence[Any]) -> None:
    """Warn of hooks that change state after `saving` saves it in this event; the order may be intended."""
    for hook in hooks:
        if isinstance(hook, type(saving)) or isinstance(saving, type(hook)) or not _changes_saved_state(hook):
            continue
        if places := _runs_after(hook, saving, event, hooks):
            logger.warning(
                "%s has priority %d in %s, after %s (%d), which saves there: its changes are missing from "
                "that checkpoint, and a resumed run would go on without them; give it a priority below %d",
                type(hook).__name__,
                places[0],
                event,
                type(saving).__name__,
                places[1],
                places[1],
            )


def _runs_after(hook: Any, other: Any, event: str, hooks: Sequence[Any]) -> tuple[int, int] | None:
    """Return the priorities of both hooks if `hook` handles an event after `other`, else None."""
    late, early = _priority_in(hook, event), _priority_in(other, event)
    if late is None or early is None:
        return None
    return (late, early) if (late, hooks.index(hook)) > (early, hooks.index(other)) else None


def _priority_in(hook: Any, event: str) -> int | None:
    """Return the priority of the hook's synchronous method for an event, None if it has none."""
    for name, events in hook._points.items() if isinstance(hook, Hook) else ():
        if event in events and not inspect.iscoroutinefunction(method := getattr(hook, name)):
            return get_priority(priority_of(hook, method))
    return None


def _changes_saved_state(hook: Any) -> bool:
    return isinstance(hook, ParamSchedulerHook | SyncBuffersHook) or (
        isinstance(hook, Hook) and (hook.stateful or bool(hook.runs_phases))
    )
