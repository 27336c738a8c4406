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
"""The name of waits for metrics in the costs."""
SLICE_SECONDS = 0.2
"""The longest single wait in seconds; after each one, the subscriber is checked for a hang."""
GRACE_SECONDS = 0.5
"""The seconds that a close waits for a delivery for which a flush has already waited in vain."""
SPARE_SECONDS = 0.5
"""The seconds before its deadline at which a close begins to end subscribers, whose queues should be empty.

As many seconds are reserved for subscribers to health events. Each of the two reserves is at most a quarter
of the timeout.
"""
JOIN_SECONDS = 0.5
"""The longest wait in seconds for all threads that were asked to end and may still look at the queues."""

Counting = AbstractContextManager[None]


# --- flush -------------------------------------------------------------------------------------------------


def flush(
    background: Background,
    timeout: float,
    counting: Callable[[], Counting],
    allowed: Callable[[], bool] | None = None,
) -> bool:
    """Wait until everything emitted so far is delivered and flushed; return False on a timeout.

    The wait includes events that subscribers emit meanwhile, but not those of other threads.

    Args:
        background: has the subscribers.
        timeout: seconds to wait at most.
        counting: creates a context in which `Background.emissions` counts the events that subscribers emit.
        allowed: returns whether the flush may be repeated while subscribers make progress. None means a fixed
            deadline, after which undelivered events are not logged.
    """
    deadline = Deadline(timeout, background.subscribers, allowed)
    complete = _flush_once(background, deadline, counting())
    if allowed is None:
        return complete
    while not (complete or background.flush_ends()) and deadline.extend():
        complete = _flush_once(background, deadline, counting())
    left = [] if complete or background.flush_ends() else _with_left(background.subscribers)
    background.logged = {each: each.emitted for each in left}
    if left:
        command = background.replay_command
        kept = f"What is left when the program ends is kept for `{command}`" if command else ""
        text = ". ".join(filter(None, (_names(left), advice(left), kept)))
        logger.warning("not everything was delivered in time: %s", text)
    return complete


def _flush_once(background: Background, deadline: Deadline, counting: Counting) -> bool:
    flushed = {each: each.emitted for each in background.subscribers}

    def emitted_since() -> list[Subscriber]:
        return [each for each in background.subscribers if each.emitted != flushed.get(each, 0)]

    complete = _flush_each(background, background.subscribers, deadline, calls=True)
    reported = background.health.report_drops(background.subscribers)
    if complete and (reported or emitted_since()):
        with counting:  # only now, because it changes the routes
            # repeated once only: two subscribers whose `on_flush` fails would get each other's reports
            if _flush_until_quiet(background, deadline, lambda: background.emissions):
                _flush_each(background, emitted_since(), deadline, calls=True)
                _flush_until_quiet(background, deadline, lambda: background.emissions)
    return complete


def _flush_until_quiet(
    background: Background, deadline: Deadline, emitted: Callable[[], int], reserve: float = 0.0
) -> bool:
    """Wait until nothing more is emitted; return False at the deadline.

    Args:
        background: has the subscribers.
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
        background: creates the deferred events, which are waited for.
        subscribers: those to wait for.
        deadline: the end of the wait.
        calls: whether to call `on_flush` at the end.
        reserve: the seconds before the deadline at which the wait ends.
    """

    def wait(ready: Callable[[float], bool]) -> bool:
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
    for each in tuple(subscribers):
        if each.runner.blocked_by_caller:
            complete = complete and (each.done or not each.queued)
        elif not each.done:
            with waiting("background", each.name):
                tests = each.filter
                if tests is not None:
                    complete = wait(partial(tests.wait, patient=True)) and complete
            requests.append((each, each.request_flush(calls=calls)))
    for each, request in requests:
        with waiting("background", each.name):
            if not wait(partial(_flushed, each, request)):
                if background.flush_ends():
                    return False
                add_vain_wait(each, deadline.seconds)
                complete = False
    return complete


def _flushed(subscriber: Subscriber, request: Flush, timeout: float) -> bool:
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

    After an interruption by a signal, the next call continues. A call during another thread's call waits
    for that call.

    Args:
        background: has the subscribers.
        timeout: seconds to wait at most.
        allowed: returns whether the deadline may move while subscribers make progress. When it becomes
            False during the close, the deadline comes nearer. None means a fixed deadline.
        advises: whether to log advice on settings that would have allowed all events to be delivered.
    """
    deadline = Deadline(timeout, list(background.subscribers), allowed)
    background.closed = True
    if not background.closer.acquire(timeout=max(0.0, timeout)):
        return False
    try:
        if not background.finished:
            with background.starting:  # waits for a start of the keeper that is in progress
                background.finished = background.thread is None
        if not background.finished:
            _close(background, deadline, advises=advises)
        return background.complete
    finally:
        background.closer.release()


def _close(background: Background, deadline: Deadline, *, advises: bool) -> None:
    """Close the queues. A signal may interrupt this anywhere, because all steps can be repeated."""
    background.complete = False  # until it is known
    background.flush_ends = lambda: False  # it is about flushes before this close
    began, subscribers = monotonic(), list(background.subscribers)
    for each in subscribers:
        each.drain()
    quiet, dropped, ended = _deliver_rest(background, subscribers, deadline)
    for each in subscribers:
        abandon(each)
    left = any(each.queued for each in subscribers)  # also counts the events that came too late
    # the end of the queues has delivered what was emitted since `dropped`, unless some came too late for it
    quiet = quiet or (_dropped(subscribers) == dropped and not background.posted)
    background.complete = quiet and ended and not left
    took, timeout = monotonic() - began, deadline.seconds
    answers = {save_undelivered(each, background.store_undelivered) for each in subscribers}
    if not background.complete:
        remedy = _remedy(background.replay_command, answers)
        text = _undelivered(background, subscribers, remedy, quiet=quiet, advises=advises)
        if text:
            seconds = round(timeout if abs(took - timeout) < 1 else took, 2)
            logger.warning("closed after %g s; events %s", seconds, text)
    background.log_losses()
    background.stop()
    _join_threads(background)
    background.clear()
    background.finished = True


def _deliver_rest(
    background: Background, subscribers: list[Subscriber], deadline: Deadline
) -> tuple[bool, int, bool]:
    """Deliver the queued events, and end the subscribers, those to health events last.

    Return whether nothing more was emitted before the end, the number of events dropped by then, and whether
    all subscribers have ended.
    """
    spare = min(SPARE_SECONDS, deadline.seconds / 4)

    def emitted() -> int:
        return sum(each.emitted for each in background.subscribers)

    reserve = 2 * spare + _less_for_vain_waits(subscribers, deadline.seconds)
    quiet = _flush_until_quiet(background, deadline, emitted, reserve)
    while not quiet and deadline.extend():
        quiet = _flush_until_quiet(background, deadline, emitted, 2 * spare)
    dropped = _dropped(subscribers)
    last = {each for kind in (HandlerFailed, EventsDropped) for each in background.listening.get(kind, ())}
    ended = _end([each for each in subscribers if each not in last], deadline, spare)
    for each in subscribers:
        end_filter_call(each)
    background.health.report_drops(subscribers)
    _flush_each(background, last, deadline, calls=False, reserve=spare / 2)
    background.reports = False  # else the last to end would count those about each other's ends as dropped
    return quiet, dropped, _end([each for each in subscribers if each in last], deadline, 0.0) and ended


def _dropped(subscribers: Iterable[Subscriber]) -> int:
    return sum(each.account.dropped for each in subscribers)


def _less_for_vain_waits(subscribers: Iterable[Subscriber], timeout: float) -> float:
    """Return the seconds less to wait because a flush has waited in vain for the current delivery.

    At least `GRACE_SECONDS` are left, so the result is negative for a shorter timeout.
    """
    longest = max(map(waited, subscribers), default=0.0)
    return timeout - max(GRACE_SECONDS, timeout - longest) if longest else 0.0


def _end(subscribers: list[Subscriber], deadline: Deadline, reserve: float) -> bool:
    """End each queue once it is empty; return False if a queue has not ended by its deadline."""
    for each in subscribers:
        each.request_close()
    ended = True
    for each in subscribers:
        if each.runner.blocked_by_caller:
            ended = ended and not each.queued
            continue
        with waiting("background", each.name):
            ended = _wait_closed(each, deadline, reserve) and ended
    return ended


def _wait_closed(subscriber: Subscriber, deadline: Deadline, reserve: float) -> bool:
    """Wait until a subscriber has ended; return False if it makes no progress at the deadline."""
    less = reserve + _less_for_vain_waits([subscriber], deadline.seconds)
    if deadline.moved:  # then what the delivery has taken so far is no reason to wait less
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
    """Wait until the threads that were asked to end have ended."""
    if on_background_thread():
        return
    ended = [each.runner.thread for each in background.subscribers if each.closed.is_set()]
    until = monotonic() + JOIN_SECONDS
    with waiting("background", "the end of its threads"):
        for thread in (*ended, background.thread, getattr(background.coroutines, "thread", None)):
            if thread is not None and thread.is_alive():
                thread.join(max(0.0, until - monotonic()))


# --- the log -----------------------------------------------------------------------------------------------


def _remedy(command: str, answers: set[bool | None]) -> str:
    """Return what the command does with the kept events; "" without any, or without a command."""
    texts = {True: "delivers", False: "says how to deliver"}
    done = " or ".join(text for answer, text in texts.items() if answer in answers)
    return f"`{command}` {done} them" if done and command else ""


def _undelivered(
    background: Background, subscribers: list[Subscriber], remedy: str, *, quiet: bool, advises: bool
) -> str:
    """Describe the undelivered events, except those that a flush at the end of a run has logged."""
    every = _with_left(subscribers)
    left = [each for each in every if each.emitted != background.logged.get(each, -1)]
    if every and not left:
        return ""
    if not (quiet or left):
        return (
            "that had not reached their subscribers by then were dropped: subscribers or other threads went "
            "on emitting"
        )
    text = ". ".join(filter(None, (_names(left) or "none", advice(left) if advises else "", remedy)))
    return f"left undelivered: {text}"


def _with_left(subscribers: Iterable[Subscriber]) -> list[Subscriber]:
    return [each for each in subscribers if each.queued or stuck(each) or each.left_in]


def _names(subscribers: list[Subscriber]) -> str:
    """List the subscribers, their numbers of undelivered events, and the calls in which they are stuck."""
    states = {each: stuck(each) or each.left_in for each in subscribers}
    return ", ".join(f"{each.name} ({each.queued}){text and f', {text}'}" for each, text in states.items())
