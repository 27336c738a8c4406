"""Extend the wait of a flush or close while subscribers still deliver.

`eventloop.background.closing` uses it. A wait without progress is not extended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from time import monotonic

from eventloop.background.queues.account import Account
from eventloop.background.queues.subscriber import Lane

logger = logging.getLogger("eventloop")

LONGEST_WAIT = 10
"""The longest wait, extensions included, as a multiple of the bus's `drain_timeout`."""


class Overtime:
    """Decide how long a flush or close continues to wait: as long as queues get shorter.

    Args:
        lanes: the queues to wait for.
        seconds: the length of the wait, and of each extension.
        allowed: returns whether there is time for an extension; called at each check.
    """

    def __init__(self, lanes: Iterable[Lane], seconds: float, allowed: Callable[[], bool]) -> None:
        self._lanes = [lane for lane in lanes if not lane.blocked_by_caller]
        self._seconds, self._allowed = seconds, allowed
        self._asked = monotonic()
        self._until = self._asked + LONGEST_WAIT * seconds
        self._accounts = {lane: lane.account for lane in self._lanes}

    def extension(self) -> float:
        """Return the seconds of the next extension, or 0.0 to stop; log subscribers that still deliver."""
        now, before = monotonic(), self._accounts
        self._accounts = {lane: lane.account for lane in self._lanes}
        took, self._asked = now - self._asked, now
        over = now + self._seconds > self._until
        if over or not self._allowed() or not self._get_on(before):
            return 0.0
        self._tell(before, max(took, 1e-9))
        return self._seconds

    def _get_on(self, before: dict[Lane, Account]) -> bool:
        """Return whether fewer events are left, and one of the subscribers that have them has handled some.

        The events of others, which have none left, are no reason to wait for a subscriber that hangs.
        """
        now = self._accounts
        fewer = sum(a.queued for a in now.values()) < sum(a.queued for a in before.values())
        return fewer and any(a.queued and _handled(a) > _handled(before[lane]) for lane, a in now.items())

    def _tell(self, before: dict[Lane, Account], took: float) -> None:
        texts = []
        for lane, account in self._accounts.items():
            left = account.queued
            rate = (before[lane].queued - left) / took
            if left and rate > 0:
                texts.append(
                    f"{lane.name} has {left:,} left and delivers {rate:,.3g} a second: "
                    f"about {left / rate:,.0f} s more"
                )
        if texts:  # empty if each queue that shrank is empty by now
            logger.warning(
                "waiting for background subscribers that still deliver, at most %.0f s more: %s",
                self._until - self._asked, "; ".join(texts),
            )  # fmt: skip


def _handled(account: Account) -> int:
    return account.delivered + account.failed + account.dropped


def advice(lanes: Iterable[Lane]) -> str:
    """Return advice on slow subscribers, as a sentence; "" if all are stuck or have empty queues."""
    slow = [lane for lane in lanes if lane.queued and not lane.stuck]
    if not slow:
        return ""
    less = ["every= or when="]
    if not all(lane.options.most for lane in slow):
        less.insert(0, "batch=True")
    if any(lane.runs_on == "thread" for lane in slow):
        less.insert(0, 'offload="process"')
    return (
        f"Give them more time with Trainer(bus=Bus(drain_timeout=...)), or less to do with {', '.join(less)}"
    )
