"""The tables of synchronous handlers: those within the iterations, and the others."""

from __future__ import annotations

from collections.abc import Sequence

from eventloop.costs.records import HandlerCost, RunCosts, SubscriberCost
from eventloop.reporting.cells import Table, longest, microseconds, percentiles, some_of
from eventloop.util.formatting import ABSENT, duration

OVER = "its p99 went over its budget, as slow_handler said"
SAMPLED = (
    "µs/iteration and share are means. Calls are counted, times are estimated from the sampled ones: p50, p99 and max "
    "are of those, and the others may have been longer."
)
LEAST_GAP = 0.05
"""Of the hooks' time: samples are no more exact than that."""


def handlers_table(costs: RunCosts) -> Table:
    """What each handler of an iteration costs, the dearest first."""
    header = [
        "handler", "event", "filter", "priority", "calls", "µs/iteration", "share", "a call, mean", "p50", "p99", "max",
        "budget",
    ]  # fmt: skip
    shown = [handler for handler in dearest(costs.handlers) if handler.in_iteration]
    rows = [
        [
            marked(handler.name, handler), handler.event, handler.filter, str(handler.priority),
            some_of(handler.calls, handler.times.samples), microseconds(handler.seconds, costs.phases),
            f"{handler.share * 100:.2f} %" if costs.phases.iterations else ABSENT,
            duration(handler.seconds / handler.calls), *percentiles(handler.times), longest(handler.times),
            budget_of(handler),
        ]
        for handler in shown
    ]  # fmt: skip
    note = "\n".join(filter(None, [SAMPLED, unexplained(costs), never_called(costs)]))
    return without_budgets(Table("Handlers", header, rows, 3, _bad(shown), OVER, note=note), shown)


def outside_table(costs: RunCosts) -> Table:
    """What those cost that are called before and after iterations."""
    header = ["handler", "event", "filter", "priority", "calls", "in all", "a call, mean", "max", "budget"]
    shown = [handler for handler in dearest(costs.handlers) if not handler.in_iteration]
    rows = [
        [
            handler.name, handler.event, handler.filter, str(handler.priority),
            some_of(handler.calls, handler.times.samples), duration(handler.seconds),
            duration(handler.seconds / handler.calls), longest(handler.times), budget_of(handler),
        ]
        for handler in shown
    ]  # fmt: skip
    return without_budgets(
        Table("Handlers outside of the iterations", header, rows, 3, _bad(shown), OVER), shown
    )


def dearest(handlers: Sequence[HandlerCost]) -> list[HandlerCost]:
    """Those that were called, the dearest first."""
    return sorted((h for h in handlers if h.calls), key=lambda handler: -handler.seconds)


def marked(name: str, handler: HandlerCost) -> str:
    """The name, and what else is in the time of this one."""
    return f"{name} ({', '.join(handler.includes)} in it)" if handler.includes else name


def unexplained(costs: RunCosts) -> str:
    """What the phases, which are exact, have of hooks, and the handlers, which are sampled, have not; "" if that is
    little, or nothing.

    A handler that runs other phases is left out of the sum: beside them it does nothing but call the handlers of the
    events between, which have rows of their own.
    """
    if not costs.phases.iterations:
        return ""
    told = sum(h.seconds for h in costs.handlers if h.in_iteration and not h.includes)
    gap = costs.phases.hooks - told
    if gap <= LEAST_GAP * costs.phases.hooks:
        return ""
    return (
        f"{duration(gap / costs.phases.iterations)} an iteration of the hooks phase is in no row: the dispatch itself, "
        "and calls that stood out and were not sampled."
    )


def never_called(costs: RunCosts) -> str:
    """Those that only waited."""
    names = [_key(handler) for handler in costs.handlers if not handler.calls]
    if not names:
        return ""
    who = "1 handler was" if len(names) == 1 else f"{len(names):,} handlers were"
    return f"{who} never called: {'; '.join(names)}."


def by_key(handlers: Sequence[HandlerCost]) -> dict[str, HandlerCost]:
    """The dearest first, by what one handler is called in two runs: its name, event and filter. Two that agree in all
    of them are told apart by their order."""
    found: dict[str, HandlerCost] = {}
    for handler in dearest(handlers):
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


def an_iteration(costs: RunCosts | None) -> dict[str, float]:
    """Microseconds of each handler of an iteration, by its key."""
    if costs is None or not costs.phases.iterations:
        return {}
    number = costs.phases.iterations
    each = by_key([handler for handler in costs.handlers if handler.in_iteration]).items()
    return {marked(key, handler): handler.seconds / number * 1e6 for key, handler in each}


def a_call(costs: RunCosts | None) -> dict[str, float]:
    """Seconds of a call of each other handler, by its key."""
    each = by_key([h for h in costs.handlers if not h.in_iteration]).items() if costs is not None else ()
    return {key: handler.seconds / handler.calls for key, handler in each}


def _bad(handlers: Sequence[HandlerCost]) -> frozenset[int]:
    return frozenset(i for i, handler in enumerate(handlers) if handler.over_budget)


def without_budgets(table: Table, costs: Sequence[HandlerCost | SubscriberCost]) -> Table:
    """The last column is for those that have some."""
    if any(cost.budget is not None for cost in costs):
        return table
    return table._replace(header=table.header[:-1], rows=[row[:-1] for row in table.rows])


def budget_of(cost: HandlerCost | SubscriberCost) -> str:
    """What its p99 should stay under."""
    return ABSENT if cost.budget is None else duration(cost.budget)
