"""Decide what follows when a worker process dies or hangs: a restart, or the end of its subscriber.

After a death, events are sent again one delivery at a time, to find the delivery that kills the worker. When
`DEATHS_IN_A_ROW` workers have died without an acknowledgement, the first delivery has failed, and `on_error`
decides whether the subscriber continues. After `DEATHS` deaths the subscriber is disabled: its unacknowledged
events count as failed, its queued ones as dropped.
"""

from __future__ import annotations

import logging
from time import monotonic

from eventloop.background.queues.runner import Delivery
from eventloop.background.queues.subscriber import Subscriber
from eventloop.background.workers.in_flight import Flights
from eventloop.events.base import event_name
from eventloop.events.deferred import Queued, unstamped
from eventloop.util.text import error_text

logger = logging.getLogger("eventloop")

DEATHS_IN_A_ROW = 3
DEATHS = 20
RESTART_SECONDS = 0.1
"""The pause before the second restart in a row, doubled for each further one; the first has no pause."""


class Restarts:
    """The deaths of one subscriber's workers, and what becomes of the events that they had."""

    def __init__(self, subscriber: Subscriber, flights: Flights) -> None:
        self.deaths = 0
        self.in_a_row = 0
        self.start_at = 0.0
        """The `monotonic` time of the next start."""
        self._subscriber, self._flights = subscriber, flights

    def stall(self, seconds: float) -> bool:
        """Count the delivery for which a worker was killed as failed; return whether the subscriber goes on.

        Args:
            seconds: how long the worker was in this delivery.
        """
        subscriber, account, flights = self._subscriber, self._subscriber.account, self._flights
        delivery = flights.waiting[0]
        error = TimeoutError(
            f"subscriber {subscriber.name} spent more than "
            f"stall_timeout={subscriber.options.stall_timeout:g} s on one delivery; its worker process was "
            "killed"
        )
        flights.acknowledge(len(delivery))
        self.in_a_row = 0
        account.end_calls(1, seconds, len(delivery), error)
        item = flights.as_delivered(delivery)
        if subscriber.options.on_error != "disable":
            subscriber.fail(error, item, seconds)
            return True
        account.last_error = str(error)
        logger.error("%s", error)
        subscriber.report(error, item, seconds)
        flights.drop()
        subscriber.give_up("stalled")
        return False

    def die(self, how: str, *, ready: bool) -> bool:
        """Handle the death of a worker: resend its events, or give up; return whether the subscriber goes on.

        Args:
            how: how the worker ended, for the message.
            ready: whether it had imported its handler.
        """
        self.deaths += 1
        self.in_a_row += 1
        pause = RESTART_SECONDS * 2 ** (self.in_a_row - 2) if self.in_a_row > 1 else 0.0
        self.start_at = monotonic() + pause
        if self.in_a_row >= DEATHS_IN_A_ROW or self.deaths >= DEATHS:
            return self._give_up_delivery(how, ready=ready)
        flights = self._flights
        flights.suspects = flights.events
        logger.warning(
            "the worker process of %s died (%s) and is started again; %d events are sent again",
            self._subscriber.name,
            how,
            flights.events + len(flights.unconfirmed),
        )
        return True

    def _give_up_delivery(self, how: str, *, ready: bool) -> bool:
        """Count the first unacknowledged delivery, which the workers were handling when they died, as failed.

        The subscriber continues only if `on_error` does not disable it and fewer than `DEATHS` workers have
        died. Otherwise all unacknowledged deliveries have failed, and the subscriber ends.

        Args:
            how: how the last worker ended, for the message.
            ready: whether it had imported its handler.
        """
        subscriber, account, flights = self._subscriber, self._subscriber.account, self._flights
        first = flights.waiting[0] if ready and flights.sent else None
        last = subscriber.options.on_error == "disable" or self.deaths >= DEATHS or first is None
        under_way = flights.waiting if last else [first or []]
        lost = [event for delivery in under_way for event in delivery]
        waiting = subscriber.queued - len(lost) if last else 0  # still queued; `end` drops them
        times = f"{self.in_a_row} times in a row" if self.in_a_row > 1 else f"{self.deaths} times"
        over = f" over {_describe(first[0])}" if first else "" if ready else " before it was ready"
        error = ChildProcessError(
            f"its worker process died {times}{over} (the last: {how}); {len(lost) + waiting} events lost"
        )
        with account.lock:
            account.failed += len(lost)
            account.in_flight -= len(lost)
        self.in_a_row = 0
        flights.suspects = flights.events - len(lost)
        item = flights.as_delivered(lost)
        if last:
            flights.clear()
            self.end(error, item)
        else:
            flights.waiting.popleft()
            subscriber.fail(error, item)
        return not last

    def end(self, error: BaseException, item: Delivery | None) -> None:
        """End the subscriber because of an error, for any value of `on_error`."""
        subscriber = self._subscriber
        subscriber.account.last_error = error_text(error)
        self._flights.drop()  # first: a thread that waits for the end finds them counted
        try:  # a handler of the log may raise, too
            logger.error("background subscriber %s failed and is disabled", subscriber.name, exc_info=error)
            subscriber.report(error, item, 0.0)
        finally:
            subscriber.give_up("error")


def _describe(item: Queued) -> str:
    event = unstamped(item)
    iteration = getattr(event, "iter", None)
    return event_name(type(event)) + ("" if iteration is None else f" of iteration {iteration}")
