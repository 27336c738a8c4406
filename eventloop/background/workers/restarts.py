"""Decide whether a subscriber continues with another worker process after a worker has died or hung.

After a death, events are sent again one delivery at a time, to find the delivery that kills the worker. If
`DEATHS_IN_A_ROW` workers have died without an acknowledgement, the first delivery counts as failed, and
`on_error` decides whether the subscriber continues. After `DEATHS` deaths the subscriber ends: its
unacknowledged events count as failed, and its queued events as dropped.
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
"""The number of workers, one after the other, that may die without an acknowledgement."""
DEATHS = 20
"""The number of workers after whose deaths the subscriber ends."""
RESTART_SECONDS = 0.1
"""The seconds before the second restart in a row, doubled for each later one; the first has no pause."""


class Restarts:
    """The deaths of one subscriber's workers, which decide how it continues with their events."""

    def __init__(self, subscriber: Subscriber, flights: Flights) -> None:
        self.deaths = 0
        """The number of workers that have died."""
        self.in_a_row = 0
        """The number of workers that have died since the last acknowledgement."""
        self.start_at = 0.0
        """The `monotonic` time before which no other worker is started."""
        self._subscriber, self._flights = subscriber, flights

    def stall(self, seconds: float) -> bool:
        """Count the delivery in which a worker hung as failed; return whether the subscriber continues.

        Args:
            seconds: the time that the worker spent in this delivery.
        """
        subscriber, account, flights = self._subscriber, self._subscriber.account, self._flights
        delivery = flights.waiting[0]
        error = TimeoutError(
            f"subscriber {subscriber.name} spent more than "
            f"stall_timeout={subscriber.options.stall_timeout:g} s on one delivery; its worker process was "
            "killed"
        )
        flights.acknowledge(len(delivery))  # so that the next worker does not receive it
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
        """Count the death of a worker; return whether the subscriber continues with another one.

        Args:
            how: the way in which the worker ended, for the message.
            ready: whether the worker had imported its handler.
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
        """Count the first unacknowledged delivery, in which the workers died, as failed.

        The subscriber continues only if `on_error` does not disable it and fewer than `DEATHS` workers have
        died. Otherwise all unacknowledged deliveries count as failed, and the subscriber ends.

        Args:
            how: the way in which the last worker ended, for the message.
            ready: whether this worker had imported its handler.

        Returns:
            whether the subscriber continues.
        """
        subscriber, account, flights = self._subscriber, self._subscriber.account, self._flights
        first = flights.waiting[0] if ready and flights.sent else None
        ends = subscriber.options.on_error == "disable" or self.deaths >= DEATHS or first is None
        failed_deliveries = flights.waiting if ends else [first or []]
        failed = [event for delivery in failed_deliveries for event in delivery]
        queued = subscriber.queued - len(failed) if ends else 0  # `end` drops these
        times = f"{self.in_a_row} times in a row" if self.in_a_row > 1 else f"{self.deaths} times"
        occasion = "" if ready else " before it was ready"
        if first:
            occasion = f" over {_describe(first[0])}"
        error = ChildProcessError(
            f"its worker process died {times}{occasion} (the last: {how}); {len(failed) + queued} events lost"
        )
        with account.lock:
            account.failed += len(failed)
            account.in_flight -= len(failed)
        self.in_a_row = 0
        flights.suspects = flights.events - len(failed)
        item = flights.as_delivered(failed)
        if ends:
            flights.clear()
            self.end(error, item)
        else:
            flights.waiting.popleft()
            subscriber.fail(error, item)
        return not ends

    def end(self, error: BaseException, item: Delivery | None) -> None:
        """End the subscriber because of an error, whatever its `on_error`; count its events as dropped.

        Args:
            error: the error.
            item: the event or batch of the failed delivery, for the report; None without one.
        """
        subscriber = self._subscriber
        subscriber.account.last_error = error_text(error)
        self._flights.drop()  # first, so that a thread that waits for the end finds the events counted
        try:  # a logging handler may raise an error too
            logger.error("background subscriber %s failed and is disabled", subscriber.name, exc_info=error)
            subscriber.report(error, item, 0.0)
        finally:
            subscriber.give_up("error")


def _describe(item: Queued) -> str:
    """Return the name of an event, with its iteration if it has one, for a message."""
    event = unstamped(item)
    iteration = getattr(event, "iter", None)
    return event_name(type(event)) + ("" if iteration is None else f" of iteration {iteration}")
