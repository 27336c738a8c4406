"""List and print the handlers of all events, in the order in which a run emits the events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from eventloop.bus.subscription import PlanRow
from eventloop.events import Event
from eventloop.events.base import event_name
from eventloop.events.catalogue import declared_events
from eventloop.util.formatting import table

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
    "before_predict",
    "before_predict_iter",
    "after_predict_iter",
    "after_predict",
    "after_run",
)
"""The events that begin and end a run, a phase, an epoch and an iteration, in their order.

The events of the optimizer's step are emitted while the handlers of `after_train_iter` run. All other events
may be emitted at any time.
"""
_POSITIONS = {name: position for position, name in enumerate(IN_ORDER)}


class EventPlan(msgspec.Struct, frozen=True):
    """An event with its handlers: sync handlers in their order, then background subscribers."""

    event: str
    handlers: list[PlanRow]


def event_plans(plan_of: Callable[[type[Event]], list[PlanRow]]) -> list[EventPlan]:
    """Return each event that has a handler, with its handlers.

    The events of `IN_ORDER` come first, then all others in the order of their declaration.

    Args:
        plan_of: returns the handlers of one event, such as `Bus.plan`.
    """
    last = len(IN_ORDER)
    events = sorted(declared_events(), key=lambda event_type: _POSITIONS.get(event_name(event_type), last))
    plans = [EventPlan(event_name(event_type), plan_of(event_type)) for event_type in events]
    return [plan for plan in plans if plan.handlers]


def plan_table(plans: Sequence[EventPlan]) -> str:
    """Return events with their handlers as a table for printing; budgets are in the column of filters.

    If there are background subscribers, which have no order, two more columns show the capacity of each queue
    and its overflow policy.
    """
    if not plans:
        return "a bus nobody listens to"
    header = ["event", "order", "priority", "handler", "runs on", "filter", "queue", "overflow"]
    rows = [
        [plan.event if i == 0 else "", *_cells(row)] for plan in plans for i, row in enumerate(plan.handlers)
    ]
    if all(row.order for plan in plans for row in plan.handlers):
        header, rows = header[:6], [row[:6] for row in rows]
    return table(header, rows, right=(1, 2, 6))


def _cells(row: PlanRow) -> list[str]:
    """Return the cells of one handler's row, without the first one, which has the name of the event."""
    budget = "" if row.budget_us is None else f"budget_us={row.budget_us:.12g}"
    filters = f"{row.filter} {budget}".strip()
    if row.order:
        return [str(row.order), str(row.priority), row.name, row.runs_on, filters, "", ""]
    return ["-", "-", row.name, row.runs_on, filters, f"{row.queue:,}", row.overflow]
