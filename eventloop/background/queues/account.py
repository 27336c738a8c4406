"""Count the events of one background subscriber, and log its losses and failures.

One lock guards the counters. It is never held while a handler, a filter or a disk operation runs.
"""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple

from eventloop.events import Event, EventsDropped
from eventloop.events.encoding_errors import BadEvent, bad_events
from eventloop.util.text import StoppedError, UnavailableError, error_text
from eventloop.util.waiting import Latch

logger = logging.getLogger("eventloop")


class Counts(NamedTuple):
    """A copy of a subscriber's counters: numbers of events, the number of `calls` and their `seconds`."""

    calls: int
    seconds: float
    delivered: int
    dropped: int
    failed: int
    queued: int
    peak: int
    spilled: int
    unconfirmed: int
    """The number of delivered events that the destination, such as a server, has not accepted yet."""


class Account:
    """The counters of a subscriber's events and calls, its last error, and the reason of its end.

    At any moment `emitted == delivered + failed + dropped + queued`, because `queued` is computed from the
    other numbers.

    Args:
        name: the subscriber's name, for the log.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.RLock()  # reentrant, because methods that hold it call others that acquire it
        # the reason why the subscriber accepts no more events: "error", "stalled", "cancelled" or "closed"
        self.ended_by = ""
        self.closed = Latch()  # set after `on_close`
        self.received = self.delivered = self.failed = self.dropped = self.calls = self.peak = 0
        self.seconds = 0.0
        self.dropped_at_end = 0  # the number of events dropped while older events stayed in the queue
        self.unconfirmed = 0  # the number of delivered events that the destination has not accepted yet
        self.in_flight = 0  # the number of events removed from the queue that do not count as delivered yet
        # the number of events in flight that were delivered; each series of deliveries has a list of its own
        self.progress = [0]
        self.last_error = ""
        # whether a log line about the error that disabled the subscriber has mentioned all losses so far
        self.losses_logged = False
        self._logged_itself = 0  # the number of failed events that the subscriber has logged itself
        self._logged_fields: set[tuple[str, str]] = set()  # event and field of each logged encoding error
        self._losses_reported = 0, 0  # the numbers of dropped and failed events at the last `new_losses`
        self.drops_reported = 0  # the number of dropped events that `events_dropped` events have reported
        self._reported_at = float("-inf")  # the time of the last `events_dropped`

    @property
    def done(self) -> bool:
        """Return whether the subscriber accepts no more events."""
        return bool(self.ended_by) or self.closed.is_set()

    @property
    def losses_named(self) -> bool:
        """Return whether the log has mentioned all dropped and failed events so far."""
        return self.losses_logged or (self.failed == self._logged_itself and not self.dropped)

    @property
    def handled(self) -> int:
        """Return the number of events that were delivered, failed or were dropped."""
        return self.delivered + self.progress[0] + self.failed + self.dropped

    def drop(self, event_type: type[Event], *, new: bool = False) -> None:
        """Count an event as dropped while older events stay in the queue.

        Args:
            event_type: the type of the event.
            new: whether the event is not counted as received yet.
        """
        self.received += new
        self.dropped_at_end += 1
        self.displace(event_type)

    def displace(self, event_type: type[Event]) -> None:
        """Count an event as dropped that was the oldest of the queue, or that `drop` counts at its end."""
        self.dropped += 1
        # counts as reported, because its own report might be dropped as well, and so on forever
        if event_type is EventsDropped:
            self.drops_reported += 1

    def end_calls(self, calls: int, seconds: float, events: int, error: BaseException | None = None) -> None:
        """Count calls of the handler that have ended.

        Args:
            calls: the number of the calls.
            seconds: the time that they took.
            events: the number of their events, which were in flight.
            error: the error that the calls raised, or None. If it names some events that cannot be encoded,
                only these events have failed.
        """
        with self.lock:
            unencodable = [] if error is None else bad_events(error, events)
            failed = 0 if error is None else len(unencodable) or events
            self._logged_itself += sum(event.reported for event in unencodable)
            self.calls += calls
            self.seconds += seconds
            self.in_flight -= events
            self.failed += failed
            self.delivered += events - failed

    def end_run(self) -> int:
        """Count the events in flight that were delivered already, and return the number of the others.

        The caller does so if it interrupts the deliveries, and counts the others itself.
        """
        delivered, self.progress = self.progress[0], [0]
        self.delivered += delivered
        others, self.in_flight = self.in_flight - delivered, 0
        return others

    def continue_from(self, former: Account, counts: Counts) -> None:
        """Begin with the counts of a subscriber that has ended; its undelivered events count as dropped.

        Args:
            former: the account of the ended subscriber.
            counts: the counts of the ended subscriber.
        """
        self.received = counts.delivered + counts.failed + counts.dropped + counts.queued
        self.calls, self.seconds, self.peak = counts.calls, counts.seconds, counts.peak
        self.delivered, self.failed = counts.delivered, counts.failed
        self.dropped = counts.dropped + counts.queued
        self._logged_itself = former._logged_itself
        self.dropped_at_end, self.last_error = former.dropped_at_end, former.last_error
        self.drops_reported, self._losses_reported = self.dropped, (self.dropped, self.failed)

    def new_losses(self, counts: Counts) -> str:
        """Describe the dropped and failed events; "" if there are no more than at the last call."""
        losses, reported = (counts.dropped, counts.failed), self._losses_reported
        self._losses_reported = losses
        if losses == reported:
            return ""
        emitted = counts.delivered + counts.dropped + counts.failed + counts.queued
        return f"{self.name}: {counts.dropped:,} dropped, {counts.failed:,} failed of {emitted:,}"

    def new_drops(self, now: float, every_seconds: float) -> int:
        """Return the number of events dropped since the last report, for another report.

        Return 0 if none was dropped, or if the last report is less than `every_seconds` old.

        Args:
            now: the time by `perf_counter`.
        """
        count = self.dropped - self.drops_reported
        if not count or now - self._reported_at < every_seconds:
            return 0
        self.drops_reported += count
        self._reported_at = now
        return count

    # --- the log -------------------------------------------------------------------------------------------

    def log_failure(self, error: BaseException, *, disable: bool) -> None:
        """Log a failed delivery if it disables the subscriber, or is its 1st, 2nd, 4th, 8th, ... failure."""
        failures = self.failed
        is_power_of_two = failures & (failures - 1) == 0
        if not (disable or is_power_of_two):
            return
        if isinstance(error, StoppedError):
            logger.warning("%s, which counts as failed", error)
            return
        outcome = "and is disabled" if disable else f"({failures} failures so far)"
        if not isinstance(error, UnavailableError):
            logger.error("background subscriber %s failed %s", self.name, outcome, exc_info=error)
            return
        self.losses_logged = disable and not self.dropped
        losses = "; the run goes on without it, and its events count as failed or dropped" if disable else ""
        logger.warning("background subscriber %s failed %s: %s%s", self.name, outcome, error, losses)

    def log_unencodable(self, events: list[BadEvent]) -> list[BadEvent]:
        """Log encoding errors whose event type and field were not logged before; return their events."""
        new = [bad for bad in events if (bad.event, bad.field) not in self._logged_fields]
        for bad in new:
            # checked once more, because several of the new errors may have the same event type and field
            if not bad.reported and (bad.event, bad.field) not in self._logged_fields:
                self._logged_fields.add((bad.event, bad.field))
                logger.error(
                    "%s: %s. This event failed, and others like it will; all others are delivered. Give the "
                    "event plain fields: numbers, texts, bytes, and lists and mappings of them",
                    self.name,
                    bad,
                )
        return new

    def log_callback(self, error: BaseException, what: str) -> None:
        """Log an error of the callback `what`, such as `on_flush`; no event counts as failed for it."""
        self.last_error = f"{error_text(error)} (in {what})"
        if isinstance(error, UnavailableError):
            logger.warning("background subscriber %s failed in %s: %s", self.name, what, error)
        else:
            logger.error("background subscriber %s failed in %s", self.name, what, exc_info=error)
