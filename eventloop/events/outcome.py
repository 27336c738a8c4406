"""Decide how a run ended: finished, failed or killed. Writers for trackers such as W&B report this status."""

from __future__ import annotations

from typing import Literal

from eventloop.events.base import Event
from eventloop.events.types import AfterRun, BeforeRun

Status = Literal["finished", "failed", "killed"]
ENDING = (BeforeRun, AfterRun)
"""The types of the events that decide how a run ended."""


class RunOutcome:
    """Decide from the event `after_run` how a run ended.

    An error makes the run "failed", but a KeyboardInterrupt makes it "killed". A signal that ended the run
    makes it "killed", even if a checkpoint was saved first. If both came, the error decides. Any other end,
    such as by `trainer.stop`, is "finished". Only `after_run` is needed, so that a worker process that
    received no earlier event decides the same.
    """

    def __init__(self) -> None:
        self._after_run: AfterRun | None = None

    def receive(self, event: Event) -> None:
        """Receive an event; only the types in `ENDING` have an effect."""
        match event:
            case BeforeRun():
                self._after_run = None
            case AfterRun():
                self._after_run = event

    @property
    def status(self) -> Status:
        """Return how the run ended; "killed" if it has not ended."""
        after_run = self._after_run
        if after_run is None or (after_run.error or "").startswith(KeyboardInterrupt.__name__):
            return "killed"
        if after_run.error is not None:
            return "failed"
        return "killed" if after_run.signal is not None else "finished"

    @property
    def error(self) -> str:
        """Return the run's error, or the reason of a run that was killed; "" if it finished."""
        if self._after_run is None:
            return "killed"
        return self._after_run.error or (self._after_run.reason if self.status == "killed" else "")
