"""Report failures, dropped events and slow handlers as health events.

Background subscribers receive these events at once. Synchronous handlers receive them when the training
thread calls `Bus.poll`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter

from eventloop.background.queues.runner import Delivery
from eventloop.background.queues.subscriber import Subscriber
from eventloop.events import Event, EventsDropped, HandlerFailed, SlowHandler
from eventloop.events.encoding_errors import logged_itself
from eventloop.util.text import error_text

logger = logging.getLogger("eventloop")

MAIL_LIMIT = 1024
"""The largest number of events, and of errors, that are kept for the next `Bus.poll`.

If there are more, the oldest are dropped. The counts of their subscribers still include them.
"""


class Health:
    """Report failures and dropped events to the subscribers to health events.

    Args:
        route: appends an event to the queues of its background subscribers, except of the given subscriber;
            called from any thread.

    Attributes:
        mail: the events for synchronous handlers, until the next `Bus.poll`.
        errors: the errors that `Bus.poll` raises, of subscribers with `on_error="raise"`.
        mail_types: the types of health events that have synchronous handlers.
        latest: the last event of each type.
    """

    def __init__(self, route: Callable[[Event, Subscriber | None], None]) -> None:
        self.mail: deque[Event] = deque(maxlen=MAIL_LIMIT)
        self.errors: deque[BaseException] = deque(maxlen=MAIL_LIMIT)
        self.mail_types: frozenset[type[Event]] = frozenset()
        self.latest: dict[type[Event], Event] = {}
        self._route = route

    def report(
        self, subscriber: Subscriber, error: BaseException, item: Delivery | None, cost: float
    ) -> None:
        """Report a failure of a subscriber by a `handler_failed` event, which it does not receive itself.

        Args:
            subscriber: the subscriber that has failed.
            error: the error that it raised.
            item: the event or batch of the failed delivery; None for a callback.
            cost: the seconds of the delivery.
        """
        events: list[Event] = []
        if item is not None:
            events = item if isinstance(item, list) else [item]
        if subscriber.options.on_error == "raise":
            if events:
                error.add_note(_place_of(subscriber, events))
            self.errors.append(error)
        report = HandlerFailed(
            handler=subscriber.name,
            error=error_text(error),
            count=max(1, subscriber.account.failed),
            cost=cost,
            logged=logged_itself(error),
        )
        # Not to background subscribers if the delivery was itself such a report: two subscribers that fail
        # would receive reports about each other forever.
        is_about_report = any(isinstance(event, HandlerFailed) for event in events)
        self._publish(report, subscriber, by_mail_only=is_about_report)

    def report_drops(self, subscribers: Iterable[Subscriber], every_seconds: float = 0.0) -> bool:
        """Report the events that were dropped since the last report; return whether there were any.

        Args:
            subscribers: the subscribers to report on.
            every_seconds: the least time between two reports on one subscriber.
        """
        now, has_reported = perf_counter(), False
        for subscriber in subscribers:
            if count := subscriber.new_drops(now, every_seconds):
                self._publish(EventsDropped(handler=subscriber.name, count=count))
                has_reported = True
        return has_reported

    def report_slow(self, name: str, event: str, budget: float, p99: float, calls: int) -> None:
        """Log and report a handler whose calls exceed its budget.

        Args:
            name, event: the names of the handler and of its event.
            budget: the budget in seconds.
            p99: the 99th percentile of the calls in seconds.
            calls: the number of calls from which `p99` was computed.
        """
        logger.warning(
            "handler %s exceeds its budget_us=%g on %s: the p99 of its calls is %s us (of %d); the event "
            "slow_handler reports it, too",
            name,
            budget * 1e6,
            event,
            f"{p99 * 1e6:,.4g}" if p99 < 1e-3 else f"{p99 * 1e6:,.0f}",
            calls,
        )
        self._publish(SlowHandler(handler=name, count=calls, cost=p99))

    def _publish(self, event: Event, about: Subscriber | None = None, *, by_mail_only: bool = False) -> None:
        """Send an event to synchronous handlers by `mail`, and to background subscribers except `about`.

        With `by_mail_only` no background subscriber receives it.
        """
        self.latest[type(event)] = event
        if type(event) in self.mail_types:
            self.mail.append(event)
        if not by_mail_only:
            self._route(event, about)


def _place_of(subscriber: Subscriber, events: list[Event]) -> str:
    """Return a note that names the subscriber and the event, in the form used for synchronous handlers."""
    batch = f", the first of a batch of {len(events)}" if len(events) > 1 else ""
    return (
        f"raised by background subscriber {subscriber.name} ({subscriber.runner.runs_on}) on "
        f"{events[0]!r}{batch}"
    )
