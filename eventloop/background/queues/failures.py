"""Log and report the failures of one background subscriber."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from eventloop.background.queues.options import LaneOptions
from eventloop.background.queues.queue import Delivery, SubscriberQueue
from eventloop.costs.records import RunsOn
from eventloop.events.encoding_errors import BadEvent, Unencodable, bad_events
from eventloop.util.text import UnavailableError, error_text

logger = logging.getLogger("eventloop")


class FailingQueue(SubscriberQueue):
    """The queue of a subscriber whose errors are logged, reported and counted according to `on_error`."""

    runs_on: ClassVar[RunsOn]

    def __init__(self, name: str, options: LaneOptions, report: Report) -> None:
        super().__init__(name, options)
        self.last_error = ""
        # whether the line about an `UnavailableError`, which disabled it, has told all losses so far
        self.losses_logged = False
        self._awaited = ""  # what its deliveries wait for, as its worker process says
        self._report = report
        self._named: set[tuple[str, str]] = set()  # event and field of each logged encoding error

    def _failure(self, error: BaseException, item: Delivery | None, took: float) -> None:
        self.last_error = error_text(error)
        if bad := bad_events(error, len(item) if isinstance(item, list) else 1):
            # not the subscriber's fault, so it continues, even with on_error="disable"
            if new := self._name(bad):
                self._report(self, Unencodable(new, len(new)), item, took)
            return
        disable, failures = self.options.on_error == "disable", self.failed
        if disable or failures & (failures - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            self._tell(error, failures, disable=disable)
        self._report(self, error, item, took)  # before give_up, so that a thread waiting for the end finds it
        if disable:
            self.give_up("error")

    def _tell(self, error: BaseException, failures: int, *, disable: bool) -> None:
        what = "and is disabled" if disable else f"({failures} failures so far)"
        if not isinstance(error, UnavailableError):
            logger.error("background subscriber %s failed %s", self.name, what, exc_info=error)
            return
        self.losses_logged = disable and not self.dropped
        rest = "; the run goes on without it, and its events count as failed or dropped" if disable else ""
        logger.warning("background subscriber %s failed %s: %s%s", self.name, what, error, rest)

    def _name(self, events: list[BadEvent]) -> list[BadEvent]:
        """Log encoding errors of events and fields that were not logged before, and return those events."""
        new = [bad for bad in events if (bad.event, bad.field) not in self._named]
        for bad in new:
            if not bad.reported and (bad.event, bad.field) not in self._named:
                self._named.add((bad.event, bad.field))
                logger.error(
                    "%s: %s. This event failed, and others like it will; all others are delivered. Give the "
                    "event plain fields: numbers, texts, bytes, and lists and mappings of them",
                    self.name, bad,
                )  # fmt: skip
        return new

    def complain(self, error: BaseException, what: str) -> None:
        """Report an error of a callback such as `on_flush`, for which no event counts as failed."""
        self.last_error = f"{error_text(error)} (in {what})"
        if self.options.on_error == "raise":
            error.add_note(f"raised by background subscriber {self.name} ({self.runs_on}) in {what}")
        if isinstance(error, UnavailableError):
            logger.warning("background subscriber %s failed in %s: %s", self.name, what, error)
        else:
            logger.error("background subscriber %s failed in %s", self.name, what, exc_info=error)
        self._report(self, error, None, 0.0)

    @abstractmethod
    def give_up(self, reason: str) -> None:
        """Take no more events, count queued ones as dropped, and release all waiting threads."""


Report = Callable[[FailingQueue, BaseException, Delivery | None, float], None]
"""The type of a function that is called for each failure: queue, error, delivery and its seconds."""
