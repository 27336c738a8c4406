"""Signals that a test sends to its own process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from eventloop import Trainer

Heard = list[int]


@contextmanager
def receiving_signals() -> Iterator[Heard]:
    """The signals that a handler of the program's own gets: with one, `train` returns."""
    taken: Heard = []
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, lambda signum, frame: taken.append(signum)) for number in numbers]
    try:
        yield taken
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def send(signum: int = signal.SIGTERM) -> None:
    """To this very process."""
    os.kill(os.getpid(), signum)


def send_in(trainer: Trainer, event: str, count: int = 1, signum: int = signal.SIGTERM) -> None:
    """Send a signal in a handler of the `count`-th event."""
    trainer.bus.subscribe(lambda event: send(signum), event, start=count - 1, once=True, name="sends")
