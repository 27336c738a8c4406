"""Keep the events that a close leaves undelivered."""

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
"""The type of a function that keeps a subscriber's undelivered events; True if a command can deliver them."""


def abandon(subscriber: Subscriber) -> None:
    """End a subscriber at the deadline of a close; undelivered events remain in its account as queued."""
    account, inbox, runner = subscriber.account, subscriber.inbox, subscriber.runner
    if not (subscriber.ended or runner.blocked_by_caller):
        subscriber.left_in = doing(subscriber) or "not ended yet"
    moving = inbox.moving.acquire(timeout=HELD_SECONDS)  # else a `when=` hangs
    try:
        with account.lock:
            ends = not account.done
            if ends:
                subscriber.left = chain(runner.in_flight(), inbox.remaining())
                account.ended_by = "closed"
    finally:
        if moving:
            inbox.moving.release()
    if ends:
        subscriber.release_waiters()
    runner.kill()


def save_undelivered(subscriber: Subscriber, store: StoreUndelivered | None) -> bool | None:
    """Call `store` with the events that a close left undelivered, including those of the current delivery.

    Return its answer, or None if nothing is kept. Its error is logged, because the close must go on.
    """
    left, answer = subscriber.left, None
    first = next(left, None)
    if store is not None and first is not None:
        try:
            answer = bool(store(subscriber.name, chain((first,), left)))
        except Exception as error:
            logger.error("%s: its undelivered events cannot be kept: %s", subscriber.name, error_text(error))
    subscriber.left = iter(())
    subscriber.inbox.spill.discard()
    return answer
