"""Decide how a run ended. Every writer that reports the end to a tracker takes its status from here."""

from __future__ import annotations

from typing import Literal

from eventloop.events.base import Event
from eventloop.events.types import AfterRun, BeforeRun, PreemptionRequested

Status = Literal["finished", "failed", "killed"]
INTERRUPTED = "interrupted by Ctrl-C"
"""The reason of a run that the first Ctrl-C has ended; the second one raises KeyboardInterrupt."""
ENDING = (BeforeRun, AfterRun, PreemptionRequested)
"""The events that decide how a run ended."""


class RunOutcome:
    """Follow the events of a run, and decide how it ended.

    A run that Ctrl-C, the signal of a job scheduler or a kill has ended was killed, even if it was saved
    first: it is not complete. A run that an error has ended has failed. Any other end, such as by
    `trainer.stop`, is a finish.
    """

    def __init__(self) -> None:
        self._ended: AfterRun | None = None
        self._killer = ""

    def receive(self, event: Event) -> None:
        """Receive an event; others than the begin and the end of a run, and a preemption, change nothing."""
        match event:
            case BeforeRun():
                self._ended, self._killer = None, ""
            case PreemptionRequested():
                self._killer = event.reason or "preempted"
            case AfterRun():
                self._ended = event
                if event.reason.endswith(INTERRUPTED):  # of another rank, too
                    self._killer = event.reason

    @property
    def status(self) -> Status:
        """Return how the run ended; "killed" if it has not ended."""
        error = None if self._ended is None else self._ended.error
        if self._ended is None or self._killer or (error or "").startswith(KeyboardInterrupt.__name__):
            return "killed"
        return "finished" if error is None else "failed"

    @property
    def error(self) -> str:
        """Return why the run is not finished: its error, or what killed it; "" if it is."""
        error = (self._ended.error if self._ended is not None else None) or ""
        if self.status != "killed":
            return error
        return error or self._killer or "killed"
