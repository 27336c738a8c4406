"""Extend the wait of a flush or close while subscribers make progress; shorten it after a signal.

A wait in which nothing is delivered and nothing is computed is not extended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from time import monotonic
from typing import NamedTuple

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


class Progress(NamedTuple):
    """What was seen of a subscriber at one moment."""

    queued: int
    handled: int
    cpu_time: float
    calling: bool


class Deadline:
    """The end of a wait. It moves while subscribers make progress, and nearer when a signal ends the run.

    Args:
        seconds: the seconds until then, and of each extension.
        subscribers: those to wait for.
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
        self._checked = monotonic()
        self._until, self._latest = self._checked + seconds, self._checked + LONGEST_WAIT * seconds
        self._allowed = allowed if allowed is not None and allowed() else None
        self._extends = self._allowed is not None
        self._before = measure(subscribers) if self._extends else {}

    def left(self, reserve: float = 0.0) -> float:
        """Return the seconds until `reserve` seconds before the end, at least 0.0."""
        now = monotonic()
        if self._allowed is not None and not self._allowed():
            self._allowed = None
            self._until = min(self._until, now + AFTER_SIGNAL * self.seconds)
        return max(0.0, self._until - reserve - now)

    def extend(self) -> bool:
        """Move the end if subscribers make progress; return whether it has; no more after a False.

        They do as long as fewer events are left each time, or a subscriber computes in a delivery or callback
        that has not returned, or in the start of its worker: on a busy machine these are slow, not stuck.
        """
        self._extends = self._extends and self.make_progress()
        if self._extends:
            self._until, self.moved = monotonic() + self.seconds, True
        return self._extends

    def make_progress(self) -> bool:
        """Return whether subscribers have made progress since the last check, and log those that have."""
        now, before = monotonic(), self._before
        after = self._before = measure(before)
        elapsed, self._checked = max(now - self._checked, 1e-9), now
        if now + self.seconds > self._latest or self._allowed is None or not self._allowed():
            return False
        computing = [each for each in after if _computes(before[each], after[each], elapsed)]
        # the events of others, which have none left, are no reason to wait for a subscriber that hangs
        fewer = sum(seen.queued for seen in after.values()) < sum(seen.queued for seen in before.values())
        handled = any(seen.queued and seen.handled > before[each].handled for each, seen in after.items())
        if not (computing or (fewer and handled)):
            return False
        texts = [_outlook(each, before[each], after[each], elapsed, each in computing) for each in after]
        if any(texts):  # not if each queue that shrank is empty by now
            logger.warning(
                "waiting for background subscribers that make progress, at most %.0f s more: %s",
                self._latest - now,
                "; ".join(filter(None, texts)),
            )
        return True


def measure(subscribers: Iterable[Subscriber]) -> dict[Subscriber, Progress]:
    """Return the progress of each subscriber that can deliver while the calling thread waits."""
    progress = {}
    for each in subscribers:
        if not each.runner.blocked_by_caller:
            counts = each.counts
            handled = counts.delivered + counts.failed + counts.dropped
            progress[each] = Progress(counts.queued, handled, each.runner.cpu_time(), each.runner.calling)
    return progress


def _computes(before: Progress, after: Progress, elapsed: float) -> bool:
    """Return whether a subscriber has computed and has handled no event, which its queue would show."""
    if not (after.queued or after.calling) or after.handled != before.handled:
        return False
    return computes(before.cpu_time, after.cpu_time, elapsed)


def _outlook(
    subscriber: Subscriber, before: Progress, after: Progress, elapsed: float, computes: bool
) -> str:
    """Describe how many events a subscriber has left, and its progress; "" without any."""
    left, rate = after.queued, (before.queued - after.queued) / elapsed
    if left and rate > 0:
        more = f"about {left / rate:,.0f} s more"
        return f"{subscriber.name} has {left:,} left and delivers {rate:,.3g} a second: {more}"
    return f"{subscriber.name} has {left:,} left, and {at_work(subscriber)}" if computes else ""


def advice(subscribers: Iterable[Subscriber]) -> str:
    """Return advice on slow subscribers, as a sentence; "" if all are stuck or have empty queues."""
    slow = [each for each in subscribers if each.queued and not stuck(each)]
    if not slow:
        return ""
    less = ["every= or when="]
    if not all(each.options.most for each in slow):
        less.insert(0, "batch=True")
    if any(each.runner.runs_on == "thread" for each in slow):
        less.insert(0, 'offload="process"')
    return (
        f"Give them more time with Trainer(bus=Bus(drain_timeout=...)), or less to do with {', '.join(less)}"
    )
