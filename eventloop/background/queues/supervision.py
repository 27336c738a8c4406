"""Supervise one background subscriber: keep its queue bounded, and find hangs.

The keeper thread of `eventloop.background.background` calls `supervise` for each subscriber several times a
second.
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
"""The seconds without an empty list of incoming events after which events go to the temporary file."""
BURST = 262_144
"""The largest number of events that wait in memory for a subscriber that is about to deliver: some 90 MB."""


def supervise(subscriber: Subscriber, now: float) -> bool:
    """Bound the queue of a subscriber and wake it, or end it if it hangs or its thread has ended.

    A subscriber hangs if a delivery, `on_flush`, `on_close` or `when=` exceeds its `stall_timeout`. A
    coroutine function has an event loop in place of a thread, and ends if that loop is closed. Events beyond
    the queue's capacity go to the temporary file only if a delivery takes long, if the subscriber is behind
    for a second, or if very many events wait. In a short burst, memory costs less than a file.

    Returns:
        whether the subscriber has dropped events that no `events_dropped` event has reported yet.
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
    """Move incoming events into the queue if the subscriber does not do so in time, and wake it."""
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


def _check_filter(subscriber: Subscriber, when_filter: WhenFilter) -> None:
    """End a subscriber whose `when=` hangs, or whose thread for it has ended."""
    if when_filter.ended and not subscriber.done:
        subscriber.give_up("error")
    limit = subscriber.options.stall_timeout
    if end_filter_call(subscriber, limit, f"spent more than stall_timeout={limit:g} s in its when="):
        subscriber.give_up("stalled")


def _end_without_thread(subscriber: Subscriber) -> None:
    """End a subscriber whose thread has ended unexpectedly.

    A thread may end without an error in its own code, for example by an exception that another thread has
    set in it.
    """
    name = f"eventloop {subscriber.name}"
    # on a new thread, because `break_off` calls `on_close`, which may hang
    thread = threading.Thread(target=subscriber.break_off, args=(None,), name=name, daemon=True)
    subscriber.runner.thread = thread
    thread.start()


def end_filter_call(subscriber: Subscriber, seconds: float = HANGS_SECONDS, what: str = "") -> bool:
    """Count the call of `when=` under way as failed if it has lasted too long; return whether it has.

    Args:
        subscriber: the subscriber with the filter.
        seconds: the limit.
        what: the predicate of the message, whose subject is the subscriber; by default "was still in its
            when= when the bus closed".
    """
    when_filter = subscriber.filter
    call = None if when_filter is None else when_filter.give_up_call(perf_counter() - seconds)
    if call is None:
        return False
    began, event = call
    what = what or f"was still in its when= when the bus closed, after more than {seconds:g} s"
    _report_stall(subscriber, what, event, perf_counter() - began)
    return True


def _end_stalled(subscriber: Subscriber, now: float) -> None:
    """End a subscriber whose delivery or callback has lasted longer than its `stall_timeout`."""
    account, runner = subscriber.account, subscriber.runner
    began = runner.began
    if account.ended_by and not runner.callback:
        return
    with account.lock:
        callback = runner.callback
        if runner.began != began or not (account.in_flight or callback):
            return  # the call has ended, or another thread has counted this stall
        item = runner.current()
        undelivered = account.end_run()
        # without batches the handler has only one event, and the other events in flight count as dropped
        failed = undelivered if runner.most else min(1, undelivered)
        account.failed += failed
        account.dropped += undelivered - failed
        runner.callback = ""
    where = f"in {callback}" if callback else "on one delivery"
    limit = subscriber.options.stall_timeout
    _report_stall(subscriber, f"spent more than stall_timeout={limit:g} s {where}", item, now - began)
    subscriber.give_up("stalled")
    if callback:
        account.ended_by = "stalled"  # `give_up` keeps an earlier reason, such as "error"


def _report_stall(subscriber: Subscriber, what: str, item: Delivery | None, elapsed: float) -> None:
    """Log and report a stalled call; `what` is the predicate of the message, `item` the call's events."""
    effect = subscriber.runner.stall_effect()
    text = f"subscriber {subscriber.name} {what}; it is no longer waited for{effect}"
    subscriber.account.last_error = text
    logger.error("%s", text)
    subscriber.report(TimeoutError(text), item, elapsed)
