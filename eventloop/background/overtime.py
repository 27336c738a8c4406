"""Extend the wait of a flush or close while subscribers make progress, and shorten it after a signal.

Subscribers make progress if they deliver events or use CPU time.
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
"""The wait after a signal has ended the run, as a part of `drain_timeout`: by default 2 s of 10 s.

A job scheduler often kills the process some seconds after the signal, and checkpoints need time too.
"""


def after_signal(drain_timeout: float, stopped_at: float | None) -> float:
    """Return the seconds that a flush or close waits after a signal.

    The time since the signal is subtracted, because subscribers could deliver in it, as during a wait for
    saves. At least half of the seconds remain.

    Args:
        drain_timeout: the wait without a signal.
        stopped_at: the `monotonic` time at which the signal stopped the loop of the run; None if the signal
            came after the loop.
    """
    seconds = AFTER_SIGNAL * drain_timeout
    elapsed = 0.0 if stopped_at is None else monotonic() - stopped_at
    return max(seconds / 2, seconds - elapsed)


class Progress(NamedTuple):
    """The state of a subscriber at one moment, from which later progress is computed."""

    queued: int
    handled: int
    """The number of events that were delivered, failed or were dropped."""
    cpu_time: float
    """The CPU time in seconds of its thread or process."""
    calling: bool
    """Whether a delivery or a callback is under way."""


class Deadline:
    """The deadline of a wait, which is extended while subscribers make progress.

    Args:
        seconds: the seconds until the deadline, and of each extension.
        subscribers: the subscribers that the caller waits for.
        allowed: returns whether extensions are allowed. If the result becomes False during the wait, because
            a signal ends the run, `AFTER_SIGNAL` of `seconds` are left from then on. None means that the
            deadline never moves.
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
        """Return the seconds until `reserve` seconds before the deadline, at least 0.0."""
        now = monotonic()
        if self._allowed is not None and not self._allowed():
            self._allowed = None
            self._until = min(self._until, now + AFTER_SIGNAL * self.seconds)
        return max(0.0, self._until - reserve - now)

    def extend(self) -> bool:
        """Extend the deadline if subscribers make progress, and return whether it was extended.

        After a False it is never extended again. Subscribers make progress if fewer events are queued than
        at the last call, or if one of them computes in a delivery, in a callback or at the start of its
        worker process: on a busy machine such calls are slow, not stuck.
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
        # not beyond the longest wait, and not after a signal
        if now + self.seconds > self._latest or self._allowed is None or not self._allowed():
            return False
        computing = [each for each in after if _computes(before[each], after[each], elapsed)]
        # a subscriber that emits as many events as it handles makes no progress
        fewer = sum(state.queued for state in after.values()) < sum(state.queued for state in before.values())
        # only subscribers that still have queued events count, because nobody waits for the others
        delivers = any(state.queued and state.handled > before[each].handled for each, state in after.items())
        if not (computing or (fewer and delivers)):
            return False
        texts = [_outlook(each, before[each], after[each], elapsed, each in computing) for each in after]
        if any(texts):
            logger.warning(
                "waiting for background subscribers that make progress, at most %.0f s more: %s",
                self._latest - now,
                "; ".join(filter(None, texts)),
            )
        return True


def measure(subscribers: Iterable[Subscriber]) -> dict[Subscriber, Progress]:
    """Return the state of each subscriber that can deliver while the calling thread waits."""
    states = {}
    for subscriber in subscribers:
        runner = subscriber.runner
        if not runner.blocked_by_caller:
            counts = subscriber.counts
            handled = counts.delivered + counts.failed + counts.dropped
            states[subscriber] = Progress(counts.queued, handled, runner.cpu_time(), runner.calling)
    return states


def _computes(before: Progress, after: Progress, elapsed: float) -> bool:
    """Return whether a subscriber has used CPU time in a call that has completed no event meanwhile.

    An idle subscriber does not compute, and one that completes events is judged by their number.

    Args:
        elapsed: the seconds from `before` to `after`.
    """
    if not (after.queued or after.calling) or after.handled != before.handled:
        return False
    return computes(before.cpu_time, after.cpu_time, elapsed)


def _outlook(
    subscriber: Subscriber, before: Progress, after: Progress, elapsed: float, computes: bool
) -> str:
    """Describe the queue of a subscriber and its progress; "" without queued events or progress.

    Args:
        elapsed: the seconds from `before` to `after`.
        computes: whether the subscriber computes in a call that has not returned.
    """
    queued, rate = after.queued, (before.queued - after.queued) / elapsed
    if queued and rate > 0:
        remaining = f"about {queued / rate:,.0f} s more"
        return f"{subscriber.name} has {queued:,} left and delivers {rate:,.3g} a second: {remaining}"
    return f"{subscriber.name} has {queued:,} left, and {at_work(subscriber)}" if computes else ""


def advice(subscribers: Iterable[Subscriber]) -> str:
    """Return advice for slow subscribers as a sentence; "" if all are stuck or have empty queues."""
    slow = [subscriber for subscriber in subscribers if subscriber.queued and not stuck(subscriber)]
    if not slow:
        return ""
    options = ["every= or when="]
    if not all(subscriber.options.most for subscriber in slow):
        options.insert(0, "batch=True")
    if any(subscriber.runner.runs_on == "thread" for subscriber in slow):
        options.insert(0, 'offload="process"')
    return (
        "Give them more time with Trainer(bus=Bus(drain_timeout=...)), or less to do with "
        f"{', '.join(options)}"
    )
