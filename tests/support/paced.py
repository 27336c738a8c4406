"""Pace a subscriber by the decisions whether a flush or close waits on, and not by time."""

from __future__ import annotations

from collections.abc import Callable
from threading import Semaphore
from time import monotonic

import pytest

from eventloop.background.overtime import Deadline
from tests.support.internals import substitute
from tests.support.process_support import until
from tests.support.trainers import DEADLINE


class Paced:
    """Let a subscriber deliver one event each time it is decided whether a flush or close waits on.

    After the last but one it delivers the last, for which no time passes. So a busy machine changes nothing.

    Args:
        monkeypatch: undoes this at the end of the test.
        left: returns the number of events that the subscriber has left.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: Callable[[], int]) -> None:
        self._let, self._left = Semaphore(0), left
        self._ends_at: float | None = None
        make_progress = Deadline.make_progress

        def decide(deadline: Deadline) -> bool:
            self._deliver_one()
            more = make_progress(deadline)
            if more and self._left() == 1:
                self._ends_at = monotonic()
                self._let.release()
            return more

        monkeypatch.setattr(Deadline, "make_progress", decide)
        substitute(monkeypatch, "overtime.monotonic", lambda: self._ends_at or monotonic())

    def wait(self) -> None:
        """Wait for the turn of a delivery, in the subscriber."""
        assert self._let.acquire(timeout=DEADLINE)

    def let_go(self) -> None:
        """Let the subscriber deliver everything."""
        self._let.release(10_000)

    def _deliver_one(self) -> None:
        if before := self._left():
            self._let.release()
            until(lambda: self._left() < before)
