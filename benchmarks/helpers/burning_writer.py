"""Work and a writer that hold a CPU, for `process_offload` and `slow_writers`.

A module of its own, as a worker process does not import the program.
"""

from __future__ import annotations

from time import process_time

from eventloop.events import Event
from eventloop.writers.writer import Writer

BURN_SECONDS = 0.020
"""Of Python, for one event."""


class Report(Event):
    """What the heavy subscriber is given."""

    step: int
    turns: int


def burn(event: Report) -> None:
    """Spin as many turns as the event says, so that the work is the same wherever it runs."""
    spin(event.turns)


def spin(turns: int) -> None:
    """Add up numbers in Python, which holds the interpreter."""
    total = 0
    for number in range(turns):
        total += number


class BurningWriter(Writer):
    """A writer whose every event is so many turns of work."""

    def __init__(self, turns: int, offload: str) -> None:
        self.turns = turns
        self.offload = offload

    def write(self, event: Event) -> None:
        """Burn."""
        spin(self.turns)


def turns() -> int:
    """How many turns take `BURN_SECONDS` of a processor."""
    tried = 100_000
    took = []
    for _ in range(10):
        began = process_time()
        spin(tried)
        took.append(process_time() - began)
    return round(tried * BURN_SECONDS / min(took))
