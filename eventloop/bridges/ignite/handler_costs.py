"""Measure the handlers of an ignite engine, each for a row of its own in the costs."""

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
    """Measure the handlers that the engine has now, until the block ends.

    ignite keeps handlers in a private table, and has no public way to wrap a handler without moving it.

    Args:
        engine: the engine.
        calls: receives the times.
        names: gives each row its name.
        trains: whether the engine trains, so that its handlers' time belongs to the iterations.
        events: the events whose handlers are measured; None means all that have handlers.
    """
    table = engine._event_handlers
    originals = {event: list(table[event]) for event in (list(table) if events is None else events)}
    measured = {}
    for event, handlers in originals.items():
        in_iteration = trains and getattr(event, "name", "") in IN_ITERATION
        measured[event] = [
            (_measured(calls, names, fn, event, in_iteration), *rest) for fn, *rest in handlers
        ]
    table.update({event: list(handlers) for event, handlers in measured.items()})
    try:
        yield
    finally:
        for event, handlers in measured.items():  # a handler that was removed within the block stays removed
            original_of = {
                id(entry[0]): original for entry, original in zip(handlers, originals[event], strict=True)
            }
            table[event] = [original_of.get(id(entry[0]), entry) for entry in table[event]]


def _measured(
    calls: ForeignCalls, names: RowNames, fn: Callable[..., Any], event: Any, in_iteration: bool
) -> Callable[..., Any]:
    """Wrap a handler to measure it. Return it unchanged if the bridge owns it or measuring it fails."""
    with measuring_only("a handler of ignite"):
        # ignite wraps a handler for an event filter, and keeps a weak reference to it in `_parent`
        reference = getattr(fn, "__dict__", {}).get("_parent")
        parent: Any = reference() if isinstance(reference, ref) else fn
        owner = parent.func if isinstance(parent, partial) else parent
        if getattr(getattr(owner, "__self__", None), "__module__", "").startswith("eventloop.bridges."):
            return fn
        event_name = str(getattr(event, "value", event))  # a program may define an event as a plain str
        call = calls.measured(fn, _row_name(names, parent, owner), event_name, in_iteration=in_iteration)
        # `remove_event_handler` of ignite compares `_parent()` with the handler to be removed
        call._parent = lambda: parent  # type: ignore[attr-defined]
        if not hasattr(fn, "__qualname__"):  # ignite's HandlersTimeProfiler reads it
            call.__qualname__ = type(fn).__name__
        return call
    return fn


def _row_name(names: RowNames, handler: Callable[..., Any], inner: Callable[..., Any]) -> str:
    """Return the name of a handler's row; methods of one object get the same number after the class name."""
    name = handler_name(handler)
    if not inspect.ismethod(inner):
        return names.of(handler, name)
    cls, _, method = name.rpartition(".")
    return f"{names.of(inner.__self__, cls)}.{method}"
