"""Supervise one background subscriber, as the keeper does: keep its queue bounded, and find hangs.

The keeper is the thread of `eventloop.background.background`.
"""

from __future__ import annotations

import logging
import threading
from time import perf_counter

from eventloop.background.queues.runner import Delivery
from eventloop.background.queues.subscriber import Subscriber
from eventloop.background.queues.when_filter import HANGS_SECONDS, WhenFilter

logger = logging.getLogger("eventloop")

BEHIND_SECONDS = 1.0
"""The seconds of lagging after which a subscriber's events beyond its capacity go to the spill file."""
BURST = 262_144
"""The largest number of events that wait in memory for a subscriber that is about to deliver: some 90 MB."""


def supervise(subscriber: Subscriber, now: float) -> bool:
    """Give up a subscriber that hangs or whose thread has ended; else bound its queue, and wake it.

    A subscriber hangs if a delivery, `on_flush`, `on_close` or `when=` exceeds its `stall_timeout`. A
    coroutine function has an event loop in place of a thread, and is given up when that loop is closed.
    Events beyond the capacity go to the spill file only if the subscriber is in a long delivery, has not
    caught up for a second, or has very many events waiting, because a file costs more than the memory of a
    short burst.

    Returns:
        Whether the subscriber has dropped events that no `events_dropped` has reported yet.
    """
    account, inbox, runner = subscriber.account, subscriber.inbox, subscriber.runner
    if subscriber.filter is not None:
        _check_filter(subscriber, subscriber.filter)
    if runner.thread is None:
        runner.check_loop()
    elif not (runner.thread.is_alive() or runner.thread.ident is None or account.closed.is_set()):
        _end_without_thread(subscriber)
    if runner.began and runner.overdue(now, subscriber.options.stall_timeout):
        _end_stalled(subscriber, now)
    if account.done:
        with account.lock:
            inbox.drop_late()
    else:
        _move_and_wake(subscriber, now)
    return account.dropped > account.drops_reported


def _move_and_wake(subscriber: Subscriber, now: float) -> None:
    inbox = subscriber.inbox
    if inbox.caught_up:
        subscriber.behind_since = now
    inbox.caught_up = not inbox.incoming
    if not (inbox.incoming or inbox.buffer):
        return
    behind = now - subscriber.behind_since > BEHIND_SECONDS or len(inbox.incoming) > BURST
    if behind or not inbox.spills or (subscriber.runner.began and subscriber.held):
        inbox.move(own=False)
    if not (subscriber.options.linger and subscriber.lingers()):
        subscriber.runner.wake()


def _check_filter(subscriber: Subscriber, tests: WhenFilter) -> None:
    if tests.ended and not subscriber.done:
        subscriber.give_up("error")
    limit = subscriber.options.stall_timeout
    if end_filter_call(subscriber, limit, f"spent more than stall_timeout={limit:g} s in its when="):
        subscriber.give_up("stalled")


def _end_without_thread(subscriber: Subscriber) -> None:
    """End a subscriber whose thread has ended before it was closed.

    The thread may have been ended in ways that its own code does not see, such as an exception that another
    thread has set in it.
    """
    name = f"eventloop {subscriber.name}"
    last = threading.Thread(target=subscriber.break_off, args=(None,), name=name, daemon=True)
    subscriber.runner.thread = last  # not the keeper: `break_off` calls `on_close`, which may hang
    last.start()


def end_filter_call(subscriber: Subscriber, seconds: float = HANGS_SECONDS, what: str = "") -> bool:
    """Count a call of `when=` as failed that has lasted longer than `seconds`; return whether one has.

    Args:
        subscriber: has the filter.
        seconds: the limit.
        what: what the subscriber did, for the message; by default that it still called the filter when the
            bus closed.
    """
    tests = subscriber.filter
    call = None if tests is None else tests.give_up_call(perf_counter() - seconds)
    if call is None:
        return False
    what = what or f"was still in its when= when the bus closed, after more than {seconds:g} s"
    _report_stall(subscriber, what, call[1], perf_counter() - call[0])
    return True


def _end_stalled(subscriber: Subscriber, now: float) -> None:
    """Give up a subscriber whose delivery or callback has lasted longer than its `stall_timeout`."""
    account, runner = subscriber.account, subscriber.runner
    began = runner.began
    if account.ended_by and not runner.callback:
        return
    with account.lock:
        callback = runner.callback
        if runner.began != began or not (account.in_flight or callback):
            return  # the call has ended, or another thread has counted this stall
        item = runner.current()
        others = account.end_run()  # of single events (no batch) only the first is in a call, and fails
        failed = others if runner.most else min(1, others)
        account.failed += failed
        account.dropped += max(0, others - failed)
        runner.callback = ""
    where = f"in {callback}" if callback else "on one delivery"
    limit = subscriber.options.stall_timeout
    _report_stall(subscriber, f"spent more than stall_timeout={limit:g} s {where}", item, now - began)
    subscriber.give_up("stalled")
    if callback:
        account.ended_by = "stalled"  # even if the subscriber had failed or was cancelled before


def _report_stall(subscriber: Subscriber, what: str, item: Delivery | None, elapsed: float) -> None:
    effect = subscriber.runner.stall_effect()
    text = f"subscriber {subscriber.name} {what}; it is no longer waited for{effect}"
    subscriber.account.last_error = text
    logger.error("%s", text)
    subscriber.report(TimeoutError(text), item, elapsed)
