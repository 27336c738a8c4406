"""What became of a background subscriber's events: at any moment `accepted == delivered + failed + dropped + queued`.

`queued` includes the delivery under way, and what has spilled to a file.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from eventloop.events import Event, EventsDropped
from eventloop.events.encoding_errors import bad_events


class Account(NamedTuple):
    """The counters at one moment, in events, but for `calls` and their `seconds`."""

    calls: int
    seconds: float
    delivered: int
    dropped: int
    failed: int
    queued: int
    peak: int
    spilled: int


class LaneAccount:
    """The counters of a lane; its lock is held where more than one of them changes."""

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
        """How many were more than the queue could take, and waited encoded."""
        return 0

    @property
    def queued(self) -> int:
        """Accepted and not yet accounted for."""
        return self.accepted - self.delivered - self.failed - self.dropped

    @property
    def routed(self) -> int:
        """How many have come that are not turned away before older ones."""
        return self.accepted - self._turned_away

    @property
    def handled(self) -> int:
        """How many of those are accounted for."""
        return self.delivered + self.failed + self.dropped - self._turned_away

    @property
    def account(self) -> Account:
        """The account of this moment."""
        with self._account:
            return Account(
                self.calls, self.seconds, self.delivered, self.dropped, self.failed, self.queued, self.peak,
                self.spilled,
            )  # fmt: skip

    def go_on_from(self, former: LaneAccount) -> None:
        """Continue the account of a lane that has ended.

        Its undelivered events count as dropped and are not logged again.
        """
        with former._account:
            self.accepted, self.delivered, self.failed = former.accepted, former.delivered, former.failed
            self.calls, self.seconds, self.peak = former.calls, former.seconds, former.peak
            self.dropped = former.dropped + former.queued
            self._turned_away = former._turned_away
        self._drops_told, self._losses_told = self.dropped, (self.dropped, self.failed)

    def new_losses(self) -> str:
        """What was dropped or has failed, in words, where that is more than when this was last asked; else ""."""
        now = self.account
        lost, told = (now.dropped, now.failed), self._losses_told
        self._losses_told = lost
        came = now.delivered + now.dropped + now.failed + now.queued
        return "" if lost == told else f"{self.name}: {lost[0]:,} dropped, {lost[1]:,} failed of {came:,}"

    def lose_many(self, event_type: type[Event | None], count: int) -> None:
        """Charge the lane with so many events of a type that it wanted, and that were dropped before they reached its queue."""
        with self._account:
            self.accepted += count
            self._turn_away(event_type, count)

    def _turn_away(self, event_type: type[Event | None], count: int) -> None:
        self.dropped += count
        self._turned_away += count
        if event_type is EventsDropped:  # told, they would be dropped here again, and that told, for ever
            self._drops_told += count

    def _charge_failure(self) -> None:
        """Of an event that did not come as far as the queue; a flush that waits for older ones goes on waiting."""
        with self._account:
            self.accepted += 1
            self.failed += 1
            self._turned_away += 1

    def _charge(self, error: BaseException, count: int) -> None:
        """Enter a delivery of so many events that failed; of one with events that cannot be encoded these alone have."""
        failed = len(bad_events(error, count)) or count
        self.failed += failed
        self.delivered += count - failed

    def new_drops(self, now: float, every: float) -> int:
        """How many events were dropped since this last said so, at most once in `every` seconds."""
        with self._account:
            count = self.dropped - self._drops_told
            if not count or now - self._drops_told_at < every:
                return 0
            self._drops_told += count
            self._drops_told_at = now
            return count
