"""Writers that fail, in a module that worker processes can import."""

from __future__ import annotations

import threading

from eventloop.events import Event
from eventloop.events.run import Run
from eventloop.writers import Writer


class Iterations(Writer):
    """Receive one event for each iteration."""

    events = ("after_train_iter",)
    name = "faulty"


class RaisesAtThird(Iterations):
    """Raise at the third event."""

    def open(self, run: Run) -> None:
        self.writes = 0

    def write(self, event: Event) -> None:
        self.writes += 1
        if self.writes == 3:
            raise ValueError("no luck")


class NeverReturns(Iterations):
    """Hang in the first write until the test opens the gate, and for good in a process."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def write(self, event: Event) -> None:
        self.gate.wait()
