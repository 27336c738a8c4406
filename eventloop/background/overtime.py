"""Extend the wait of a flush or close while subscribers make progress; shorten it after a signal.

`eventloop.background.closing` uses it. A wait in which nothing is delivered and nothing is computed is not
extended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from time import monotonic
from typing import NamedTuple

from eventloop.background.queues.account import Counts
from eventloop.background.queues.awaited import at_work, stuck
from eventloop.background.queues.subscriber import Subscriber
from eventloop.processes.cpu_time import computes

logger = logging.getLogger("eventloop")

LONGEST_WAIT = 10
"""The longest wait, extensions included, as a multiple of the bus's `drain_timeout`."""
AFTER_SIGNAL = 0.2
"""The wait after a signal has ended the run, as a share of `drain_timeout`: 2 s of 10.

Whoever sends the signal often kills the process some seconds later, and checkpoints need time too.
"""


def after_signal(drain_timeout: float, stopped_at: float | None) -> float:
    """Return the seconds of a wait after a signal.

    What the end of the run has waited for before, such as saves, is subtracted, up to a half of the seconds:
    the subscribers have delivered meanwhile.

    Args:
        drain_timeout: the wait without a signal.
        stopped_at: the `monotonic` time at which the signal stopped the loop of the run; None if it came
            when the loop had ended.
    """
    whole = AFTER_SIGNAL * drain_timeout
    used = 0.0 if stopped_at is None else monotonic() - stopped_at
    return max(whole / 2, whole - used)


class _Look(NamedTuple):
    """What was seen of a subscriber at one moment."""

    account: Counts
    cpu_time: float
    in_a_call: bool

    @property
    def waited_for(self) -> bool:
        return bool(self.account.queued) or self.in_a_call

    @property
    def handled(self) -> int:
        return self.account.delivered + self.account.failed + self.account.dropped


class Overtime:
    """Decide how long a flush or close continues to wait: as long as subscribers make progress.

    That is, as long as fewer events are left each time, or a subscriber computes in a delivery or callback
    that has not returned, or in the start of its worker: on a busy machine these are slow, not stuck.

    Args:
        subscribers: the queues to wait for.
        seconds: the length of the wait, and of each extension.
        allowed: returns whether there is time for an extension; called at each check.
    """

    def __init__(
        self, subscribers: Iterable[Subscriber], seconds: float, allowed: Callable[[], bool]
    ) -> None:
        self._lanes = [subscriber for subscriber in subscribers if not subscriber.runner.blocked_by_caller]
        self._seconds, self._allowed = seconds, allowed
        self._asked = monotonic()
        self._until = self._asked + LONGEST_WAIT * seconds
        self._looks = self._look()

    def extension(self) -> float:
        """Return the seconds of the next extension, or 0.0 to stop; log subscribers that are waited for."""
        now, before = monotonic(), self._looks
        self._looks = self._look()
        took, self._asked = max(now - self._asked, 1e-9), now
        if now + self._seconds > self._until or not self._allowed():
            return 0.0
        computing = [
            subscriber
            for subscriber, look in self._looks.items()
            if _computes(before[subscriber], look, took)
        ]
        if not (computing or self._gets_shorter(before)):
            return 0.0
        self._tell(before, took, computing)
        return self._seconds

    def _look(self) -> dict[Subscriber, _Look]:
        return {
            subscriber: _Look(subscriber.counts, subscriber.runner.cpu_time(), subscriber.runner.calling)
            for subscriber in self._lanes
        }

    def _gets_shorter(self, before: dict[Subscriber, _Look]) -> bool:
        """Return whether fewer events are left, and one of the subscribers that have them has handled some.

        The events of others, which have none left, are no reason to wait for a subscriber that hangs.
        """
        now = self._looks
        fewer = _queued(now) < _queued(before)
        return fewer and any(
            look.account.queued and look.handled > before[subscriber].handled
            for subscriber, look in now.items()
        )

    def _tell(self, before: dict[Subscriber, _Look], took: float, computing: list[Subscriber]) -> None:
        texts = []
        for subscriber, look in self._looks.items():
            left = look.account.queued
            rate = (before[subscriber].account.queued - left) / took
            if left and rate > 0:
                texts.append(
                    f"{subscriber.name} has {left:,} left and delivers {rate:,.3g} a second: "
                    f"about {left / rate:,.0f} s more"
                )
            elif subscriber in computing:
                texts.append(f"{subscriber.name} has {left:,} left, and {at_work(subscriber)}")
        if texts:  # empty if each queue that shrank is empty by now
            logger.warning(
                "waiting for background subscribers that make progress, at most %.0f s more: %s",
                self._until - self._asked, "; ".join(texts),
            )  # fmt: skip


class Deadline:
    """The end of a wait. It moves while subscribers make progress, and nearer when a signal ends the run.

    Args:
        seconds: the seconds until then.
        subscribers: the queues to wait for.
        allowed: returns whether there is time for an extension. When it becomes False during the wait, it
            leaves `AFTER_SIGNAL` of the time. None means that the deadline does not move.
    """

    def __init__(
        self,
        seconds: float,
        subscribers: Iterable[Subscriber] = (),
        allowed: Callable[[], bool] | None = None,
    ) -> None:
        self.seconds = seconds
        self.moved = False
        """Whether the wait was extended."""
        self._until = monotonic() + seconds
        self._allowed = allowed if allowed is not None and allowed() else None
        self._overtime = None if self._allowed is None else Overtime(subscribers, seconds, self._allowed)

    def left(self, reserve: float = 0.0) -> float:
        """Return the seconds until `reserve` seconds before the end, at least 0.0."""
        now = monotonic()
        if self._allowed is not None and not self._allowed():
            self._allowed = None
            self._until = min(self._until, now + AFTER_SIGNAL * self.seconds)
        return max(0.0, self._until - reserve - now)

    def extend(self) -> bool:
        """Move the end if subscribers make progress; return whether it has; no more after a False."""
        more = 0.0 if self._overtime is None else self._overtime.extension()
        if not more:
            self._overtime = None
            return False
        self._until, self.moved = monotonic() + more, True
        return True


def _computes(before: _Look, now: _Look, took: float) -> bool:
    """Return whether a subscriber has computed and has handled no event, which its queue would show."""
    if not now.waited_for or now.handled != before.handled:
        return False
    return computes(before.cpu_time, now.cpu_time, took)


def _queued(looks: dict[Subscriber, _Look]) -> int:
    return sum(look.account.queued for look in looks.values())


def advice(subscribers: Iterable[Subscriber]) -> str:
    """Return advice on slow subscribers, as a sentence; "" if all are stuck or have empty queues."""
    slow = [subscriber for subscriber in subscribers if subscriber.queued and not stuck(subscriber)]
    if not slow:
        return ""
    less = ["every= or when="]
    if not all(subscriber.options.most for subscriber in slow):
        less.insert(0, "batch=True")
    if any(subscriber.runner.runs_on == "thread" for subscriber in slow):
        less.insert(0, 'offload="process"')
    return (
        f"Give them more time with Trainer(bus=Bus(drain_timeout=...)), or less to do with {', '.join(less)}"
    )
