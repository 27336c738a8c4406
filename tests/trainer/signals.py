"""Signals that a test sends to its own process."""

from __future__ import annotations

import os
import signal

from eventloop import Trainer

Heard = list[int]


def send(signum: int = signal.SIGTERM) -> None:
    """To this very process."""
    os.kill(os.getpid(), signum)


def send_in(trainer: Trainer, event: str, count: int = 1, signum: int = signal.SIGTERM) -> None:
    """Send a signal in a handler of the `count`-th event."""
    trainer.bus.subscribe(lambda event: send(signum), event, start=count - 1, once=True, name="sends")
