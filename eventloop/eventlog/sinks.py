"""Declare the protocol of the writers that a replay writes to, because this package imports no writers."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from eventloop.events import Event
from eventloop.events.deferred import Timed
from eventloop.events.run import Run


@runtime_checkable
class Sink(Protocol):
    """A destination to which a replay writes events, such as an `eventloop.writers.Writer`."""

    @property
    def events(self) -> tuple[str | type[Event], ...]:
        """Return the names or classes of the events that the destination receives; "*" for every event."""

    @property
    def batch(self) -> bool | int:
        """Return how events are passed: one by one to `write` if False, else in lists to `write_batch`.

        A number is the largest length of a list; True sets no limit.
        """

    def open(self, run: Run) -> None:
        """Prepare for a run; called before the first event."""

    def write(self, event: Event) -> None:
        """Write an event."""

    def write_batch(self, events: list[Event]) -> None:
        """Write several events, in order."""

    def flush(self) -> None:
        """Write the buffered events; called after the last event."""

    def close(self) -> None:
        """Release resources; called at the end, also after an error."""


@runtime_checkable
class TimedSink(Protocol):
    """A destination that receives the times of events."""

    @property
    def takes_times(self) -> bool:
        """Return whether a replay calls `write_timed`, not `write` or `write_batch`."""

    def write_timed(self, events: list[Timed]) -> None:
        """Write events in order, each with the Unix time of its log record."""


class Written(msgspec.Struct, frozen=True):
    """The counts of the values written to an experiment tracker, which stores one value per name and step."""

    service: str
    """The name of the tracker in messages."""
    new: int
    """The number of values that the tracker did not have before."""
    known: int
    """The number of values that the tracker had before, and that were not written again."""

    def __str__(self) -> str:
        """Describe the counts in a clause, such as "3 new values for W&B, which had 5 already"."""
        if not self.new and self.known:
            return f"nothing new for {self.service}, which had all {self.known:,} values already"
        had = f", which had {self.known:,} already" if self.known else ""
        noun = "value" if self.new == 1 else "values"
        return f"{self.new:,} new {noun} for {self.service}{had}"
