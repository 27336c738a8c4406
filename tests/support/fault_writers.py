"""Writers that fail, in a module, so that worker processes can import them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from eventloop.events import Event
from eventloop.events.run import Run
from eventloop.writers.writer import Writer


class Iterations(Writer):
    """Is given an event an iteration."""

    events = ("after_train_iter",)
    name = "faulty"


class RaisesAtThird(Iterations):
    """A writer whose third write fails."""

    def open(self, run: Run) -> None:
        self.writes = 0

    def write(self, event: Event) -> None:
        self.writes += 1
        if self.writes == 3:
            raise ValueError("no luck")


class NeverReturns(Iterations):
    """A writer whose first write lasts until the test lets it go, and for good in a process."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def write(self, event: Event) -> None:
        self.gate.wait()


class FaultNumbered(Event):
    """One of many."""

    number: int


class TakesItsTime(Writer):
    """A writer of batches that says which events it had, and when a batch was over."""

    events = (FaultNumbered,)
    name = "faulty"
    batch = True
    offload = "process"

    def open(self, run: Run) -> None:
        self.path = Path(run.work_dir, "taken.txt")

    def write_batch(self, events: list[Event]) -> None:
        with open(self.path, "a", encoding="utf-8", buffering=1) as file:
            for event in events:
                assert isinstance(event, FaultNumbered)
                file.write(f"{event.number}\n")
                time.sleep(0.003)
            file.write("over\n")
