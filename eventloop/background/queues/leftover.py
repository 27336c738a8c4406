"""End subscribers at the deadline of a close, and store their undelivered events for a later delivery."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import chain

from eventloop.background.queues.awaited import doing
from eventloop.background.queues.subscriber import HELD_SECONDS, Subscriber
from eventloop.events import Event
from eventloop.util.text import error_text

logger = logging.getLogger("eventloop")

StoreUndelivered = Callable[[str, Iterable[Event]], bool | None]
"""The type of a function that stores undelivered events, given the subscriber's name and the events.

It returns True if a command can deliver the stored events.
"""


def abandon(subscriber: Subscriber) -> None:
    """End a subscriber at the deadline of a close; its undelivered events still count as queued."""
    account, inbox, runner = subscriber.account, subscriber.inbox, subscriber.runner
    if not (subscriber.ended or runner.blocked_by_caller):
        subscriber.left_in = doing(subscriber) or "not ended yet"
    has_lock = inbox.moving.acquire(timeout=HELD_SECONDS)  # False if a hanging call of `when=` holds the lock
    try:
        with account.lock:
            ends_now = not account.done
            if ends_now:
                subscriber.left = chain(runner.in_flight(), inbox.remaining())
                account.ended_by = "closed"
    finally:
        if has_lock:
            inbox.moving.release()
    if ends_now:
        subscriber.release_waiters()
    runner.kill()


def save_undelivered(subscriber: Subscriber, store: StoreUndelivered | None) -> bool | None:
    """Call `store` with the events that a close left undelivered, including those of the current delivery.

    An error of `store` is logged, because the close must go on.

    Returns:
        the result of `store`; None if it was not called, or raised an error.
    """
    undelivered, answer = subscriber.left, None
    first = next(undelivered, None)
    if store is not None and first is not None:
        try:
            answer = bool(store(subscriber.name, chain((first,), undelivered)))
        except Exception as error:
            logger.error("%s: its undelivered events cannot be kept: %s", subscriber.name, error_text(error))
    subscriber.left = iter(())
    subscriber.inbox.spill.discard()
    return answer
