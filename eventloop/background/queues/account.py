"""Account for a background subscriber's events.

At any moment `accepted == delivered + failed + dropped + queued`; `queued` includes the delivery under way
and the events in the spill file.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from eventloop.events import Event, EventsDropped
from eventloop.events.encoding_errors import bad_events


class Account(NamedTuple):
    """The counters at one moment: numbers of events, except `calls` and their `seconds`."""

    calls: int
    seconds: float
    delivered: int
    dropped: int
    failed: int
    queued: int
    peak: int
    spilled: int


class LaneAccount:
    """The counters of a queue; its lock is held while more than one of them changes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.accepted = self.delivered = self.failed = self.dropped = self.calls = self.peak = 0
        self.seconds = 0.0
        self._turned_away = 0  # dropped, or failed in the filter, although older events stay in the queue
        self._account = threading.Lock()
        self._losses_told = 0, 0  # dropped and failed
        self._drops_told = 0
        self._drops_told_at = float("-inf")

    @property
    def spilled(self) -> int:
        """Return how many events exceeded the queue's capacity and waited encoded."""
        return 0

    @property
    def queued(self) -> int:
        """Return how many accepted events are not yet delivered, failed or dropped."""
        return self.accepted - self.delivered - self.failed - self.dropped

    @property
    def routed(self) -> int:
        """Return how many events have come, except those turned away before older ones were delivered."""
        return self.accepted - self._turned_away

    @property
    def handled(self) -> int:
        """Return how many of the `routed` events are delivered, failed or dropped."""
        return self.delivered + self.failed + self.dropped - self._turned_away

    @property
    def account(self) -> Account:
        """Return a copy of the counters."""
        with self._account:
            return Account(
                self.calls, self.seconds, self.delivered, self.dropped, self.failed, self.queued, self.peak,
                self.spilled,
            )  # fmt: skip

    def go_on_from(self, former: LaneAccount) -> None:
        """Continue the account of a subscriber that has ended.

        Its undelivered events count as dropped and are not logged again.
        """
        with former._account:
            self.accepted, self.delivered, self.failed = former.accepted, former.delivered, former.failed
            self.calls, self.seconds, self.peak = former.calls, former.seconds, former.peak
            self.dropped = former.dropped + former.queued
            self._turned_away = former._turned_away
        self._drops_told, self._losses_told = self.dropped, (self.dropped, self.failed)

    def new_losses(self) -> str:
        """Describe the dropped and failed events if there are more than at the last call, else return ""."""
        now = self.account
        lost, told = (now.dropped, now.failed), self._losses_told
        self._losses_told = lost
        came = now.delivered + now.dropped + now.failed + now.queued
        return "" if lost == told else f"{self.name}: {lost[0]:,} dropped, {lost[1]:,} failed of {came:,}"

    def lose_many(self, event_type: type[Event | None], count: int) -> None:
        """Count `count` wanted events of a type as dropped before they reached the queue."""
        with self._account:
            self.accepted += count
            self._turn_away(event_type, count)

    def _turn_away(self, event_type: type[Event | None], count: int) -> None:
        self.dropped += count
        self._turned_away += count
        if event_type is EventsDropped:  # a report of these drops would be dropped here again, for ever
            self._drops_told += count

    def _charge_failure(self) -> None:
        """Count an event as failed before it reached the queue; a flush of older events still waits."""
        with self._account:
            self.accepted += 1
            self.failed += 1
            self._turned_away += 1

    def _charge(self, error: BaseException, count: int) -> None:
        """Count a failed delivery of `count` events.

        If the error names events that cannot be encoded, only these have failed.
        """
        failed = len(bad_events(error, count)) or count
        self.failed += failed
        self.delivered += count - failed

    def new_drops(self, now: float, every: float) -> int:
        """Return the number of events dropped since the last report, 0 within `every` seconds after it."""
        with self._account:
            count = self.dropped - self._drops_told
            if not count or now - self._drops_told_at < every:
                return 0
            self._drops_told += count
            self._drops_told_at = now
            return count
