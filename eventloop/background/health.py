"""Report failures, drops and slow handlers as events.

Background subscribers receive these events at once. Synchronous handlers receive them when the training
thread polls.
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
"""The largest number of events and errors kept for a training thread that does not poll.

The account of the subscriber counts each of them as well.
"""


class Health:
    """Report failures and drops: at once to background subscribers, through `mail` to synchronous handlers.

    Args:
        route: puts an event into the queues of its subscribers, except of the given one; called from any
            thread.
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
        """Report one failure to every subscriber except the failed one."""
        items = item if isinstance(item, list) else [] if item is None else [item]
        if subscriber.options.on_error == "raise":
            if items:
                error.add_note(_place_of(subscriber, items))
            self.errors.append(error)
        text = error_text(error)
        event = HandlerFailed(
            handler=subscriber.name,
            error=text,
            count=max(1, subscriber.account.failed),
            cost=cost,
            logged=logged_itself(error),
        )
        # a failure on a report goes to `mail` only: two such subscribers would report each other forever
        self._publish(event, subscriber, by_mail_only=any(isinstance(i, HandlerFailed) for i in items))

    def report_drops(self, subscribers: Iterable[Subscriber], every_seconds: float = 0.0) -> bool:
        """Report the events dropped since the last report; return whether there were any.

        Args:
            subscribers: the queues to report on.
            every_seconds: the least time between two reports on one subscriber.
        """
        now, told = perf_counter(), False
        for subscriber in subscribers:
            if count := subscriber.new_drops(now, every_seconds):
                self._publish(EventsDropped(handler=subscriber.name, count=count))
                told = True
        return told

    def report_slow(self, name: str, event: str, budget: float, p99: float, calls: int) -> None:
        """Report a handler whose p99 exceeds its budget.

        Args:
            name, event: the names of the handler and of its event.
            budget, p99: in seconds.
            calls: the number of calls from which the p99 was computed.
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
