"""Hooks whose turn comes after a checkpoint of the same event is saved, which then lacks what they do."""

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


def refuse_late(average: Hook, savings: Sequence[Hook], hooks: Sequence[Any]) -> None:
    """Refuse an average that takes in an iteration's weights after one of `savings` may have saved it.

    Args:
        hooks: all of a trainer, in the order they are subscribed in.

    Raises:
        ValueError: see the message.
    """
    for event in ("after_train_iter", "after_train_epoch"):
        for saving in savings:
            if places := _runs_after(average, saving, event, hooks):
                raise ValueError(
                    f"{type(average).__name__} has priority {places[0]} in {event}, behind {type(saving).__name__} "
                    f"({places[1]}): a checkpoint would lack the last update, and a resumed run average other weights; "
                    f"give it a priority below {places[1]}"
                )


def tell_late(saving: Hook, event: str, hooks: Sequence[Any]) -> None:
    """Name those whose state, or what they change of the trainer's, is not in what is saved at this event. There may be
    a reason: it is no error."""
    for hook in hooks:
        if (
            isinstance(hook, type(saving))
            or isinstance(saving, type(hook))
            or not _changes_what_is_saved(hook)
        ):
            continue
        if places := _runs_after(hook, saving, event, hooks):
            logger.warning(
                "%s has priority %d in %s, behind %s (%d), which saves there: what it changes then is not in that "
                "checkpoint, and a resumed run would go on without it; give it a priority below %d",
                type(hook).__name__, places[0], event, type(saving).__name__, places[1], places[1],
            )  # fmt: skip


def _runs_after(hook: Any, other: Any, event: str, hooks: Sequence[Any]) -> tuple[int, int] | None:
    """The priorities of both where `hook` hears an event after `other`, None where it does not."""
    late, early = _heard_at(hook, event), _heard_at(other, event)
    if late is None or early is None:
        return None
    return (late, early) if (late, hooks.index(hook)) > (early, hooks.index(other)) else None


def _heard_at(hook: Any, event: str) -> int | None:
    """The priority of a method on the training thread."""
    for name, events in hook._points.items() if isinstance(hook, Hook) else ():
        if event in events and not inspect.iscoroutinefunction(method := getattr(hook, name)):
            return get_priority(priority_of(hook, method))
    return None


def _changes_what_is_saved(hook: Any) -> bool:
    return isinstance(hook, ParamSchedulerHook | SyncBuffersHook) or (
        isinstance(hook, Hook) and (hook.stateful or bool(hook.runs_phases))
    )
