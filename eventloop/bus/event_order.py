"""Who hears what over a whole run, in the order in which the events come."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from eventloop.bus.subscription import PlanRow
from eventloop.events import Event
from eventloop.events.base import event_name
from eventloop.events.catalogue import declared_events

IN_ORDER = (
    "before_run",
    "before_train",
    "before_train_epoch",
    "before_train_iter",
    "after_train_iter",
    "after_backward",
    "before_optimizer_step",
    "after_optimizer_step",
    "optimizer_step_skipped",
    "after_train_epoch",
    "before_val",
    "before_val_epoch",
    "before_val_iter",
    "after_val_iter",
    "after_val_epoch",
    "after_val",
    "after_train",
    "before_test",
    "before_test_epoch",
    "before_test_iter",
    "after_test_iter",
    "after_test_epoch",
    "after_test",
    "after_run",
)
"""The events that begin and end things, as a run emits them; those of the optimizer's step come while the handlers of
`after_train_iter` run. The others may come at any time."""
_PLACES = {name: place for place, name in enumerate(IN_ORDER)}


class EventPlan(msgspec.Struct, frozen=True):
    """One event, and who hears it: the sync handlers as they run, then the background subscribers."""

    event: str
    handlers: list[PlanRow]


def event_plans(plan_of: Callable[[type[Event]], list[PlanRow]]) -> list[EventPlan]:
    """Return the plan of every event that has a handler: first those of `IN_ORDER`, then in order of declaration.

    Args:
        plan_of: gives the handlers of one event, as `Bus.plan`.
    """
    in_order = sorted(declared_events(), key=lambda kind: _PLACES.get(event_name(kind), len(IN_ORDER)))
    plans = [EventPlan(event_name(kind), plan_of(kind)) for kind in in_order]
    return [plan for plan in plans if plan.handlers]
