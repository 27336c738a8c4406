"""Flush and close the background subscribers: wait until the events emitted so far are delivered.

Every wait ends at its deadline, even if a subscriber hangs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from time import monotonic

from eventloop.background.background import Background
from eventloop.background.overtime import Deadline, advice
from eventloop.background.queues.awaited import add_vain_wait, stuck, waited
from eventloop.background.queues.leftover import abandon, save_undelivered
from eventloop.background.queues.runner import Flush
from eventloop.background.queues.subscriber import Subscriber
from eventloop.background.queues.supervision import end_filter_call
from eventloop.background.threads import on_background_thread
from eventloop.costs.waits import waiting
from eventloop.events import EventsDropped, HandlerFailed

logger = logging.getLogger("eventloop")

METRICS = "values from the device"
"""The name, in the record of costs, of waits until metrics have left the device."""
SLICE_SECONDS = 0.2
"""The longest time in seconds to block at once, before the deadline is checked again."""
GRACE_SECONDS = 0.5
"""The seconds that a close waits for a delivery for which a flush has already waited in vain."""
SPARE_SECONDS = 0.5
"""The seconds of a close that are reserved for ending subscribers after the wait for empty queues.

As many seconds are reserved for ending the subscribers to health events, which end last. Each of the two
reserves is at most a quarter of the timeout.
"""
JOIN_SECONDS = 0.5
"""The longest wait in seconds, at the end of a close, for the threads that were asked to end."""

Counting = AbstractContextManager[None]


# --- flush -------------------------------------------------------------------------------------------------


def flush(
    background: Background,
    timeout: float,
    counting: Callable[[], Counting],
    allowed: Callable[[], bool] | None = None,
) -> bool:
    """Wait until all events emitted so far are delivered and flushed; return False on a timeout.

    The wait includes events that subscribers emit meanwhile, but not those of other threads.

    Args:
        background: the background with the subscribers.
        timeout: seconds to wait at most.
        counting: returns a context in which `Background.emissions` counts the events that subscribers emit.
        allowed: returns whether the flush may be repeated while subscribers make progress. None means that it
            is not repeated, and that undelivered events are not logged.
    """
    deadline = Deadline(timeout, background.subscribers, allowed)
    complete = _flush_once(background, deadline, counting())
    if allowed is None:
        return complete
    while not (complete or background.flush_ends()) and deadline.extend():
        complete = _flush_once(background, deadline, counting())
    incomplete = [] if complete or background.flush_ends() else _incomplete(background.subscribers)
    background.logged = {subscriber: subscriber.emitted for subscriber in incomplete}
    if incomplete:
        command = background.replay_command
        remedy = f"What is left when the program ends is kept for `{command}`" if command else ""
        text = ". ".join(filter(None, (_names(incomplete), advice(incomplete), remedy)))
        logger.warning("not everything was delivered in time: %s", text)
    return complete


def _flush_once(background: Background, deadline: Deadline, counting: Counting) -> bool:
    """Flush all subscribers, and once more those that receive events meanwhile; return False on a timeout."""
    emitted_before = {subscriber: subscriber.emitted for subscriber in background.subscribers}

    def with_new_events() -> list[Subscriber]:
        return [each for each in background.subscribers if each.emitted != emitted_before.get(each, 0)]

    complete = _flush_each(background, background.subscribers, deadline, calls=True)
    reported = background.health.report_drops(background.subscribers)
    if complete and (reported or with_new_events()):
        with counting:  # not from the begin, because the count makes emits slower
            # Repeated only once: two subscribers to `handler_failed` whose `on_flush` fails would otherwise
            # receive reports about each other forever.
            if _flush_until_quiet(background, deadline, lambda: background.emissions):
                _flush_each(background, with_new_events(), deadline, calls=True)
                _flush_until_quiet(background, deadline, lambda: background.emissions)
    return complete


def _flush_until_quiet(
    background: Background, deadline: Deadline, emitted: Callable[[], int], reserve: float = 0.0
) -> bool:
    """Wait until all queues are empty and no more events are emitted; return False at the deadline.

    Args:
        background: the background with the subscribers.
        deadline: the end of the wait.
        emitted: returns the number of events emitted so far.
        reserve: the seconds before the deadline at which the wait ends.
    """
    while True:
        before = emitted()
        in_time = _flush_each(background, background.subscribers, deadline, calls=False, reserve=reserve)
        if not in_time or not deadline.left(reserve):
            return False
        if emitted() == before and not background.posted:
            return True


def _flush_each(
    background: Background,
    subscribers: Iterable[Subscriber],
    deadline: Deadline,
    *,
    calls: bool,
    reserve: float = 0.0,
) -> bool:
    """Wait until each subscriber has handled the events emitted for it so far; return False on a timeout.

    Args:
        background: the subscribers' background. Its deferred events must be created first.
        subscribers: the subscribers to wait for.
        deadline: the end of the wait.
        calls: whether each subscriber calls its `on_flush` then.
        reserve: the seconds before the deadline at which the wait ends.
    """

    def wait(ready: Callable[[float], bool]) -> bool:
        """Wait in slices until `ready` returns True; return False at the deadline or if a close follows."""
        while not ready(min(SLICE_SECONDS, deadline.left(reserve))):
            if background.flush_ends() or not deadline.left(reserve):
                return False
        return True

    complete = True
    with suppress(IndexError), waiting("background", METRICS):
        last_posted = background.posted[-1]
        background.wake()
        complete = wait(last_posted.made.wait)
    requests = []
    for subscriber in tuple(subscribers):
        if subscriber.runner.blocked_by_caller:
            complete = complete and (subscriber.done or not subscriber.queued)
        elif not subscriber.done:
            with waiting("background", subscriber.name):
                when_filter = subscriber.filter
                if when_filter is not None:
                    complete = wait(partial(when_filter.wait, patient=True)) and complete
            requests.append((subscriber, subscriber.request_flush(calls=calls)))
    for subscriber, request in requests:
        with waiting("background", subscriber.name):
            if not wait(partial(_is_flushed, subscriber, request)):
                if background.flush_ends():
                    return False
                add_vain_wait(subscriber, deadline.seconds)
                complete = False
    return complete


def _is_flushed(subscriber: Subscriber, request: Flush, timeout: float) -> bool:
    """Wait until a requested flush is made or the subscriber has ended; return False on a timeout."""
    return request.made.wait(timeout) or subscriber.done


# --- close -------------------------------------------------------------------------------------------------


def close(
    background: Background,
    timeout: float,
    allowed: Callable[[], bool] | None = None,
    *,
    advises: bool = False,
) -> bool:
    """Deliver the queued events, close every queue and stop the threads; return False on a timeout.

    If a signal interrupts a call, the next call continues it. A call while another thread closes the
    background waits for that thread.

    Args:
        background: the background with the subscribers.
        timeout: seconds to wait at most.
        allowed: returns whether the deadline may be extended while subscribers make progress. If the result
            becomes False during the close, the deadline moves nearer. None means a fixed deadline.
        advises: whether to log advice on settings with which all events would have been delivered.
    """
    deadline = Deadline(timeout, list(background.subscribers), allowed)
    background.closed = True
    if not background.closer.acquire(timeout=max(0.0, timeout)):
        return False
    try:
        if not background.finished:
            with background.starting:  # another thread may be starting the background's thread
                background.finished = background.thread is None
        if not background.finished:
            _close(background, deadline, advises=advises)
        return background.complete
    finally:
        background.closer.release()


def _close(background: Background, deadline: Deadline, *, advises: bool) -> None:
    """Close the queues. A signal may interrupt this at any point, because each step can be repeated."""
    background.complete = False
    background.flush_ends = lambda: False  # it ends only flushes before the close, and none in the close
    began, subscribers = monotonic(), list(background.subscribers)
    for subscriber in subscribers:
        subscriber.drain()
    quiet, dropped, ended = _deliver_rest(background, subscribers, deadline)
    for subscriber in subscribers:
        abandon(subscriber)
    has_queued = any(subscriber.queued for subscriber in subscribers)
    # events that were emitted after the wait were delivered as well, unless some were dropped since then
    quiet = quiet or (_dropped(subscribers) == dropped and not background.posted)
    background.complete = quiet and ended and not has_queued
    seconds, timeout = monotonic() - began, deadline.seconds
    answers = {save_undelivered(subscriber, background.store_undelivered) for subscriber in subscribers}
    if not background.complete:
        remedy = _remedy(background.replay_command, answers)
        text = _undelivered(background, subscribers, remedy, quiet=quiet, advises=advises)
        if text:
            shown_seconds = round(timeout if abs(seconds - timeout) < 1 else seconds, 2)
            logger.warning("closed after %g s; events %s", shown_seconds, text)
    background.log_losses()
    background.stop()
    _join_threads(background)
    background.clear()
    background.finished = True


def _deliver_rest(
    background: Background, subscribers: list[Subscriber], deadline: Deadline
) -> tuple[bool, int, bool]:
    """Deliver the queued events, and end the subscribers, those to health events last.

    Returns:
        whether all queues were empty and no more events were emitted, the number of events that were dropped
        up to that moment, and whether all subscribers have ended.
    """
    spare = min(SPARE_SECONDS, deadline.seconds / 4)

    def emitted() -> int:
        return sum(subscriber.emitted for subscriber in background.subscribers)

    reserve = 2 * spare + _less_for_vain_waits(subscribers, deadline.seconds)
    quiet = _flush_until_quiet(background, deadline, emitted, reserve)
    while not quiet and deadline.extend():
        # not shortened any more, because subscribers have made progress since the vain waits
        quiet = _flush_until_quiet(background, deadline, emitted, 2 * spare)
    dropped = _dropped(subscribers)
    health_events = (HandlerFailed, EventsDropped)
    of_health = {each for event_type in health_events for each in background.listening.get(event_type, ())}
    ended = _end([each for each in subscribers if each not in of_health], deadline, spare)
    for subscriber in subscribers:
        end_filter_call(subscriber)
    background.health.report_drops(subscribers)
    _flush_each(background, of_health, deadline, calls=False, reserve=spare / 2)
    background.reports = False  # a subscriber that has ended would only count later reports as dropped
    health_ended = _end([each for each in subscribers if each in of_health], deadline, 0.0)
    return quiet, dropped, health_ended and ended


def _dropped(subscribers: Iterable[Subscriber]) -> int:
    """Return the number of events that the subscribers have dropped."""
    return sum(subscriber.account.dropped for subscriber in subscribers)


def _less_for_vain_waits(subscribers: Iterable[Subscriber], timeout: float) -> float:
    """Return by how many seconds the wait of a close is shorter, because a flush has waited in vain.

    The close still waits for the rest of the timeout, and at least for `GRACE_SECONDS`. So the result is
    negative if the timeout is below `GRACE_SECONDS`.
    """
    longest = max(map(waited, subscribers), default=0.0)
    return timeout - max(GRACE_SECONDS, timeout - longest) if longest else 0.0


def _end(subscribers: list[Subscriber], deadline: Deadline, reserve: float) -> bool:
    """Ask each subscriber to end once its queue is empty; return False if one has not ended in time.

    Args:
        reserve: the seconds before the deadline at which the wait ends.
    """
    for subscriber in subscribers:
        subscriber.request_close()
    all_ended = True
    for subscriber in subscribers:
        if subscriber.runner.blocked_by_caller:
            all_ended = all_ended and not subscriber.queued
            continue
        with waiting("background", subscriber.name):
            all_ended = _wait_closed(subscriber, deadline, reserve) and all_ended
    return all_ended


def _wait_closed(subscriber: Subscriber, deadline: Deadline, reserve: float) -> bool:
    """Wait until a subscriber has ended; return False if it has not at the deadline and makes no progress."""
    less = reserve + _less_for_vain_waits([subscriber], deadline.seconds)
    if deadline.moved:  # the subscriber has made progress since the flush waited in vain
        less = min(less, reserve)
    while not subscriber.wait_closed(min(SLICE_SECONDS, deadline.left(less))):
        if deadline.left(less):
            continue
        add_vain_wait(subscriber, deadline.seconds)
        if not deadline.extend():
            return False
        less = min(less, reserve)
    return True


def _join_threads(background: Background) -> None:
    """Wait until the threads that were asked to end have ended, at most `JOIN_SECONDS`."""
    if on_background_thread():
        return
    threads = [each.runner.thread for each in background.subscribers if each.closed.is_set()]
    deadline = monotonic() + JOIN_SECONDS
    with waiting("background", "the end of its threads"):
        for thread in (*threads, background.thread, getattr(background.coroutines, "thread", None)):
            if thread is not None and thread.is_alive():
                thread.join(max(0.0, deadline - monotonic()))


# --- the log -----------------------------------------------------------------------------------------------


def _remedy(command: str, answers: set[bool | None]) -> str:
    """Return a text that says what a command does with the stored events; "" without a command or events.

    Args:
        answers: the results of `save_undelivered` for each subscriber.
    """
    texts = {True: "delivers", False: "says how to deliver"}
    verbs = " or ".join(text for answer, text in texts.items() if answer in answers)
    return f"`{command}` {verbs} them" if verbs and command else ""


def _undelivered(
    background: Background, subscribers: list[Subscriber], remedy: str, *, quiet: bool, advises: bool
) -> str:
    """Describe the undelivered events, except those that a flush at the end of a run has logged."""
    incomplete = _incomplete(subscribers)
    not_logged = [each for each in incomplete if each.emitted != background.logged.get(each, -1)]
    if incomplete and not not_logged:
        return ""
    if not (quiet or not_logged):
        return (
            "that had not reached their subscribers by then were dropped: subscribers or other threads went "
            "on emitting"
        )
    names, help_text = _names(not_logged) or "none", advice(not_logged) if advises else ""
    return f"left undelivered: {'. '.join(filter(None, (names, help_text, remedy)))}"


def _incomplete(subscribers: Iterable[Subscriber]) -> list[Subscriber]:
    """Return the subscribers that have undelivered events, are stuck, or had not ended at the deadline."""
    return [each for each in subscribers if each.queued or stuck(each) or each.left_in]


def _names(subscribers: list[Subscriber]) -> str:
    """List the subscribers, their numbers of undelivered events, and the calls in which they are stuck."""
    states = {subscriber: stuck(subscriber) or subscriber.left_in for subscriber in subscribers}
    return ", ".join(
        f"{subscriber.name} ({subscriber.queued}){f', {state}' if state else ''}"
        for subscriber, state in states.items()
    )
