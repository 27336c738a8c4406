"""One event announced to handlers that do nothing, by a plain loop over them and by the bus."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.helpers.timing import Case, statement
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter

BUILD = "AfterTrainIter(iter=7, epoch=0, batch_idx=7, max_iters=1000, max_epochs=10)"
EVENT = AfterTrainIter(iter=7, epoch=0, batch_idx=7, max_iters=1000, max_epochs=10)


def plain(handlers: list[Callable[[object], None]], event: object) -> None:
    """The baseline: what a hand-written loop would do."""
    for f in handlers:
        f(event)


def dispatch_cases(n: int, number: int) -> list[Case]:
    """The plain loop and the bus, each with the event ready and with the event built in the same statement."""
    bus = Bus()
    handlers: list[Callable[[object], None]] = [lambda event: None for _ in range(n)]
    for _ in range(n):
        bus.subscribe(lambda event: None, AfterTrainIter)
    loop = {
        "plain": plain,
        "handlers": handlers,
        "event": EVENT,
        "AfterTrainIter": AfterTrainIter,
    }
    emit = {"bus": bus, "event": EVENT, "AfterTrainIter": AfterTrainIter}
    return [
        statement(f"plain {n}", "plain(handlers, event)", number, loop),
        statement(f"plain, built {n}", f"plain(handlers, {BUILD})", number, loop),
        statement(f"bus.emit, ready {n}", "bus.emit(event)", number, emit),
        statement(f"bus.emit {n}", f"bus.emit({BUILD})", number, emit),
    ]
