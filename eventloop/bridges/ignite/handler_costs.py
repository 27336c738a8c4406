"""Give each handler of an ignite engine a row in the costs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

from ignite.engine import Engine

from eventloop.bridges.row_names import RowNames
from eventloop.bridges.unmeasured import measuring_only
from eventloop.costs.foreign_calls import ForeignCalls
from eventloop.util.functions import handler_name

IN_ITERATION = ("GET_BATCH_STARTED", "GET_BATCH_COMPLETED", "ITERATION_STARTED", "ITERATION_COMPLETED")


@contextmanager
def measuring(
    engine: Engine,
    calls: ForeignCalls,
    names: RowNames,
    *,
    trains: bool = False,
    events: Sequence[Any] | None = None,
) -> Iterator[None]:
    """Measure each handler that the engine has now for some events, or for all, until the block ends.

    ignite keeps handlers in a private table, and has no public way to wrap a handler in its place.

    Args:
        engine: the engine.
        calls, names: hold the rows and their names.
        trains: whether the engine's iterations are those of the training.
        events: the events; None means all that have handlers.
    """
    table = engine._event_handlers
    kept = {event: list(table[event]) for event in (list(table) if events is None else events)}
    measured = {}
    for event, handlers in kept.items():
        inside = trains and getattr(event, "name", "") in IN_ITERATION
        measured[event] = [(_measured(calls, names, fn, event, inside), *rest) for fn, *rest in handlers]
    table.update({event: list(handlers) for event, handlers in measured.items()})
    try:
        yield
    finally:
        for event, handlers in measured.items():  # handlers that were removed meanwhile stay removed
            before = dict(zip(map(id, (h[0] for h in handlers)), kept[event], strict=True))
            table[event] = [before.get(id(h[0]), h) for h in table[event]]


def _measured(
    calls: ForeignCalls, names: RowNames, fn: Callable[..., Any], event: Any, inside: bool
) -> Callable[..., Any]:
    """Return a measured handler; the bridge's own handlers, and one without a name, as they are."""
    with measuring_only("a handler of ignite"):
        kept = getattr(fn, "__dict__", {}).get("_parent")  # of a filter; no attribute of the program's
        parent: Any = kept() if isinstance(kept, ref) else fn
        owner = parent.func if isinstance(parent, partial) else parent
        if getattr(getattr(owner, "__self__", None), "__module__", "").startswith("eventloop.bridges."):
            return fn
        name = str(getattr(event, "value", event))  # an event of the program's own may be a text
        call = calls.measured(fn, _row_name(names, parent, owner), name, in_iteration=inside)
        call._parent = lambda: parent  # type: ignore[attr-defined]  # ignite finds a handler to remove by it
        if not hasattr(fn, "__qualname__"):  # HandlersTimeProfiler shows it
            call.__qualname__ = type(fn).__name__
        return call
    return fn


def _row_name(names: RowNames, handler: Callable[..., Any], inner: Callable[..., Any]) -> str:
    """Return the name of a handler's row. Handlers that are methods of one object share its number."""
    name = handler_name(handler)
    if not inspect.ismethod(inner):
        return names.of(handler, name)
    cls, _, method = name.rpartition(".")
    return f"{names.of(inner.__self__, cls)}.{method}"
