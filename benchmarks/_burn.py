"""The writer of `process_offload`: in a module of its own, as a worker does not import the program."""

from __future__ import annotations

from eventloop.events import Event


class Report(Event):
    """What the heavy writer is given."""

    step: int
    turns: int


def burn(event: Report) -> None:
    """As many turns wherever it runs."""
    total = 0
    for number in range(event.turns):
        total += number
