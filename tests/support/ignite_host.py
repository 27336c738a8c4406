"""Count the handlers of an ignite engine, which has no public list of them."""

from __future__ import annotations

from typing import Any


def handlers_of(engine: Any, *events: Any) -> int:
    """Return the number of an engine's handlers, of some events or of all."""
    handlers = engine._event_handlers
    return sum(len(handlers[event]) for event in events or [*handlers])
