"""Decide how a run ended. Every writer that reports the end to a tracker takes its status from here."""

from __future__ import annotations

from typing import Literal

from eventloop.events.base import Event
from eventloop.events.types import AfterRun, BeforeRun

Status = Literal["finished", "failed", "killed"]
ENDING = (BeforeRun, AfterRun)
"""The events that decide how a run ended."""


class RunOutcome:
    """Follow the events of a run, and decide how it ended.

    The error and the signal of `after_run` decide alone, so that a worker process that has seen no event
    before it has the same answer. A run that a signal has ended was killed, even if it was saved first, and
    even if the signal came in its last iteration: the process ends by it. A signal after the last boundary
    changes nothing, because the run has ended by itself. A run that an error has ended has failed, also if a
    signal came before the error. Any other end, such as by `trainer.stop`, is a finish.
    """

    def __init__(self) -> None:
        self._ended: AfterRun | None = None

    def receive(self, event: Event) -> None:
        """Receive an event; others than the begin and the end of a run change nothing."""
        match event:
            case BeforeRun():
                self._ended = None
            case AfterRun():
                self._ended = event

    @property
    def status(self) -> Status:
        """Return how the run ended; "killed" if it has not ended."""
        ended = self._ended
        if ended is None or (ended.error or "").startswith(KeyboardInterrupt.__name__):
            return "killed"
        if ended.error is not None:
            return "failed"
        return "killed" if ended.signal is not None else "finished"

    @property
    def error(self) -> str:
        """Return why the run is not finished: its error, or what killed it; "" if it is."""
        if self._ended is None:
            return "killed"
        return self._ended.error or (self._ended.reason if self.status == "killed" else "")
