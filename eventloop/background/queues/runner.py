"""Define what a runner is: the thread, task or process that delivers the events of one subscriber."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter
from typing import Any, ClassVar

from eventloop.background.queues.account import Account
from eventloop.background.queues.inbox import Inbox
from eventloop.costs.records import RunsOn
from eventloop.events import Event
from eventloop.events.deferred import unstamped
from eventloop.util.functions import awaited_by
from eventloop.util.waiting import Latch

Delivery = Event | list[Event]


class Flush:
    """A request to flush a subscriber once it has handled the first `after` events.

    With `calls` it then calls `on_flush`.
    """

    def __init__(self, after: int, *, calls: bool) -> None:
        self.after = after
        self.calls = calls
        self.made = Latch()


class Runner(ABC):
    """Deliver the events of one subscriber; `eventloop.background.runners` has the kinds.

    The methods here are those of a runner that calls the handler in this process.

    Args:
        fn: the handler.
        most: the largest batch; 0 if events are delivered one by one.
        account, inbox: those of the subscriber.
    """

    runs_on: ClassVar[RunsOn]
    thread: threading.Thread | None = None
    """Its own thread; None for a task."""

    def __init__(self, fn: Callable[..., Any], most: int, account: Account, inbox: Inbox) -> None:
        self.fn, self.most, self.account, self.inbox = fn, most, account, inbox
        self._owner = getattr(fn, "__self__", None)  # the writer whose method is the handler
        self.began = 0.0
        """When the delivery, or the callback, under way began; 0.0 without one."""
        self.callback = ""
        """The running callback; "" again once it is reported as stalled."""

    @abstractmethod
    def start(self) -> None:
        """Start the delivering thread or task."""

    @abstractmethod
    def wake(self) -> None:
        """Wake the delivering thread or task because the queue has events; safe from any thread."""

    # --- what other threads see ----------------------------------------------------------------------------

    @property
    def starting(self) -> bool:
        """Return whether the thread, task or worker process is still starting."""
        return False

    @property
    def blocked_by_caller(self) -> bool:
        """Return whether the queue cannot become empty while the calling thread waits for it."""
        return False

    @property
    def calling(self) -> bool:
        """Return whether a delivery or a callback is under way."""
        return bool(self.began)

    def call(self) -> tuple[float, float, str]:
        """Return the begin, the seconds and the callback's name of the current call; zeros without one.

        The name is "" for a delivery.
        """
        began = self.began
        return (began, perf_counter() - began, self.callback) if began else (0.0, 0.0, "")

    def awaited(self) -> str:
        """Return what the handler says that its deliveries wait for, as ", waiting for X"."""
        return awaited_by(self.fn)

    def obstacle(self) -> str:
        """Describe why events wait, if it is not the subscriber's own call; "" otherwise."""
        return ""

    def stall_effect(self) -> str:
        """Return a sentence on what a stall does to other subscribers; "" if nothing."""
        return ""

    def overdue(self, now: float, limit: float) -> bool:
        """Return whether the current delivery or callback has lasted longer than `limit` seconds."""
        return bool(self.began) and now - self.began > limit

    def cpu_time(self) -> float:
        """Return the CPU time in seconds that it has used so far; 0.0 if that is unknown, as of a task."""
        return 0.0

    def in_flight(self) -> list[Event]:
        """Return the events that were taken out of the queue, and are neither delivered nor failed yet."""
        count = self.account.in_flight - self.account.progress[0]
        return [unstamped(item) for item in self.inbox.last_popped[-count:]] if count > 0 else []

    def current(self) -> Delivery | None:
        """Return the current delivery: an event, or a list of events with `batch`."""
        events = self.in_flight()
        return (events if self.most else events[0]) if events else None

    def unconfirmed(self) -> int:
        """Return how many of the delivered events the destination has not accepted, as the handler says."""
        return min(self.account.delivered, int(getattr(self._owner, "untaken", 0)))

    # --- what they ask for ---------------------------------------------------------------------------------

    def forward_flush(self, flush: Flush) -> bool:
        """Forward a flush that is due to a worker process; False if the subscriber flushes here."""
        return False

    def check_loop(self) -> None:  # noqa: B027  # only one kind needs it
        """End the subscriber if its event loop was closed."""

    def kill(self) -> None:  # noqa: B027  # only one kind needs it
        """End a worker process at the deadline of a close."""

    def release(self) -> None:  # noqa: B027  # only one kind needs it
        """End the worker process after an error of the delivering thread, and drop the events sent to it."""

    def abandon_in_child(self) -> None:  # noqa: B027  # only one kind needs it
        """Release what belongs to the parent process, in a forked child process."""
