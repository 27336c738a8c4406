"""Make the tables of synchronous handlers: those called within iterations, and the others."""

from __future__ import annotations

from collections.abc import Sequence

from eventloop.costs.records import HandlerCost, RunCosts, SubscriberCost
from eventloop.reporting.cells import Table, calls_text, longest, microseconds, percentiles
from eventloop.util.formatting import ABSENT, duration

OVER = "its p99 went over its budget, as slow_handler said"
SAMPLED = (
    "µs/iteration and share are means. Calls are counted, times are estimated from the sampled ones: p50, "
    "p99 and max are of those, and the others may have been longer."
)
LEAST_GAP = 0.05
"""Share of the hooks' time below which a gap is not reported: samples are not more exact."""


def handlers_table(costs: RunCosts) -> Table:
    """Return the table of the handlers called within iterations, the most expensive first."""
    header = [
        "handler", "event", "filter", "priority", "calls", "µs/iteration", "share", "a call, mean",
        "p50", "p99", "max", "budget",
    ]  # fmt: skip
    shown = [handler for handler in most_expensive(costs.handlers) if handler.in_iteration]
    rows = [
        [
            with_includes(handler.name, handler), handler.event, handler.filter, str(handler.priority),
            calls_text(handler.calls, handler.times.samples), microseconds(handler.seconds, costs.phases),
            f"{handler.share * 100:.2f} %" if costs.phases.iterations else ABSENT,
            duration(handler.seconds / handler.calls), *percentiles(handler.times), longest(handler.times),
            budget_of(handler),
        ]
        for handler in shown
    ]  # fmt: skip
    note = "\n".join(filter(None, [SAMPLED, unexplained(costs), never_called(costs)]))
    return without_budgets(Table("Handlers", header, rows, 3, _bad(shown), OVER, note=note), shown)


def outside_table(costs: RunCosts) -> Table:
    """Return the table of the handlers called before and after iterations."""
    header = ["handler", "event", "filter", "priority", "calls", "in all", "a call, mean", "max", "budget"]
    shown = [handler for handler in most_expensive(costs.handlers) if not handler.in_iteration]
    rows = [
        [
            handler.name, handler.event, handler.filter, str(handler.priority),
            calls_text(handler.calls, handler.times.samples), duration(handler.seconds),
            duration(handler.seconds / handler.calls), longest(handler.times), budget_of(handler),
        ]
        for handler in shown
    ]  # fmt: skip
    return without_budgets(
        Table("Handlers outside of the iterations", header, rows, 3, _bad(shown), OVER), shown
    )


def most_expensive(handlers: Sequence[HandlerCost]) -> list[HandlerCost]:
    """Return the handlers that were called, the most expensive first."""
    return sorted((h for h in handlers if h.calls), key=lambda handler: -handler.seconds)


def with_includes(name: str, handler: HandlerCost) -> str:
    """Return a handler's name, followed by the phases that its time includes."""
    return f"{name} ({', '.join(handler.includes)} in it)" if handler.includes else name


def unexplained(costs: RunCosts) -> str:
    """Return a note on hook time that is in no row, "" if it is little.

    Phases are measured exactly, handlers by samples. A handler that runs other phases is left out of the sum:
    apart from those phases, it only calls handlers that have rows of their own.
    """
    if not costs.phases.iterations:
        return ""
    in_rows = sum(h.seconds for h in costs.handlers if h.in_iteration and not h.includes)
    gap = costs.phases.hooks - in_rows
    if gap <= LEAST_GAP * costs.phases.hooks:
        return ""
    return (
        f"{duration(gap / costs.phases.iterations)} an iteration of the hooks phase is in no row: the "
        "dispatch itself, and calls that stood out and were not sampled."
    )


def never_called(costs: RunCosts) -> str:
    """Return a note that names the handlers that were never called, "" without any."""
    names = [_key(handler) for handler in costs.handlers if not handler.calls]
    if not names:
        return ""
    subject = "1 handler was" if len(names) == 1 else f"{len(names):,} handlers were"
    return f"{subject} never called: {'; '.join(names)}."


def by_key(handlers: Sequence[HandlerCost]) -> dict[str, HandlerCost]:
    """Map name, event and filter to each called handler, the most expensive first.

    The key identifies a handler in several runs. Handlers with an equal key are distinguished by their order.
    """
    found: dict[str, HandlerCost] = {}
    for handler in most_expensive(handlers):
        key = _key(handler)
        while key in found:
            key += "'"
        found[key] = handler
    return found


def _key(handler: HandlerCost) -> str:
    key = handler.name
    if not key.endswith(f".{handler.event}"):  # a hook's method mostly has the name of its event
        key += f", {handler.event}"
    return f"{key} [{handler.filter}]" if handler.filter else key


def microseconds_per_iteration(costs: RunCosts | None) -> dict[str, float]:
    """Return the mean microseconds an iteration of each handler called within iterations, by key."""
    if costs is None or not costs.phases.iterations:
        return {}
    number = costs.phases.iterations
    each = by_key([handler for handler in costs.handlers if handler.in_iteration]).items()
    return {with_includes(key, handler): handler.seconds / number * 1e6 for key, handler in each}


def seconds_per_call(costs: RunCosts | None) -> dict[str, float]:
    """Return the mean seconds a call of each handler called outside of iterations, by key."""
    each = by_key([h for h in costs.handlers if not h.in_iteration]).items() if costs is not None else ()
    return {key: handler.seconds / handler.calls for key, handler in each}


def _bad(handlers: Sequence[HandlerCost]) -> frozenset[int]:
    return frozenset(i for i, handler in enumerate(handlers) if handler.over_budget)


def without_budgets(table: Table, costs: Sequence[HandlerCost | SubscriberCost]) -> Table:
    """Drop the last column, which holds budgets, if no row has one."""
    if any(cost.budget is not None for cost in costs):
        return table
    return table._replace(header=table.header[:-1], rows=[row[:-1] for row in table.rows])


def budget_of(cost: HandlerCost | SubscriberCost) -> str:
    """Format a budget, the limit of p99."""
    return ABSENT if cost.budget is None else duration(cost.budget)
