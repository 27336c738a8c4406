"""Define the base class of runners: the thread, task or process that delivers a subscriber's events."""

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
    """A request to flush a subscriber once it has handled a number of events.

    Args:
        after: the number of events, counted from the subscriber's first one.
        calls: whether to call `on_flush` then; if False, the flush only shows that the events are handled.

    Attributes:
        made: set once the flush is done.
    """

    def __init__(self, after: int, *, calls: bool) -> None:
        self.after = after
        self.calls = calls
        self.made = Latch()


class Runner(ABC):
    """Deliver the events of one subscriber.

    The methods of this class are for a runner that calls the handler in this process, on a thread or in a
    task. The runner of a worker process overrides many of them.

    Args:
        fn: the handler.
        most: the largest batch; 0 if events are delivered one by one.
        account, inbox: the subscriber's account and inbox.
    """

    runs_on: ClassVar[RunsOn]
    thread: threading.Thread | None = None
    """The runner's own thread; None for a task."""

    def __init__(self, fn: Callable[..., Any], most: int, account: Account, inbox: Inbox) -> None:
        self.fn, self.most, self.account, self.inbox = fn, most, account, inbox
        self._owner = getattr(fn, "__self__", None)  # the writer whose method is the handler
        self.began = 0.0
        """The time at which the delivery or callback under way began, by `perf_counter`; 0.0 without one."""
        self.callback = ""
        """The name of the callback under way; "" without one, or after it was reported as stalled."""

    @abstractmethod
    def start(self) -> None:
        """Start the delivering thread or task."""

    @abstractmethod
    def wake(self) -> None:
        """Wake the delivering thread or task because the queue has events; safe from any thread."""

    # --- the state, for other threads ----------------------------------------------------------------------

    @property
    def starting(self) -> bool:
        """Return whether the thread, task or worker process is still starting."""
        return False

    @property
    def blocked_by_caller(self) -> bool:
        """Return whether nothing can be delivered while the calling thread waits.

        True if the calling thread itself runs the event loop of the subscriber's task.
        """
        return False

    @property
    def calling(self) -> bool:
        """Return whether a delivery or a callback is under way."""
        return bool(self.began)

    def call(self) -> tuple[float, float, str]:
        """Return the begin, the seconds and the name of the current callback or delivery; zeros without one.

        The name of a delivery is "".
        """
        began = self.began
        return (began, perf_counter() - began, self.callback) if began else (0.0, 0.0, "")

    def awaited(self) -> str:
        """Return ", waiting for X" if the handler's object says that its deliveries wait for X, else ""."""
        return awaited_by(self.fn)

    def obstacle(self) -> str:
        """Describe why events wait, if the reason is not a call of the subscriber itself; "" otherwise."""
        return ""

    def stall_effect(self) -> str:
        """Return a sentence about the effect of a stalled delivery on other subscribers; "" without any."""
        return ""

    def overdue(self, now: float, limit: float) -> bool:
        """Return whether the current delivery or callback has lasted longer than `limit` seconds."""
        return bool(self.began) and now - self.began > limit

    def cpu_time(self) -> float:
        """Return the CPU time in seconds of the runner's thread or process; 0.0 for a task."""
        return 0.0

    def in_flight(self) -> list[Event]:
        """Return the events that were removed from the queue, and are neither delivered nor failed yet."""
        count = self.account.in_flight - self.account.progress[0]
        return [unstamped(item) for item in self.inbox.last_popped[-count:]] if count > 0 else []

    def current(self) -> Delivery | None:
        """Return the current delivery: an event, or a list of events with `batch`; None without one."""
        events = self.in_flight()
        if not events:
            return None
        return events if self.most else events[0]

    def unconfirmed(self) -> int:
        """Return the number of delivered events that the destination has not accepted yet.

        The handler's object has the number in its attribute `untaken`.
        """
        return min(self.account.delivered, int(getattr(self._owner, "untaken", 0)))

    # --- requests of other threads -------------------------------------------------------------------------

    def forward_flush(self, flush: Flush) -> bool:
        """Send a flush that is due to the worker process; return False if there is no worker process."""
        return False

    def check_loop(self) -> None:  # noqa: B027  # only one kind needs it
        """End the subscriber if its event loop was closed."""

    def kill(self) -> None:  # noqa: B027  # only one kind needs it
        """End a worker process at the deadline of a close."""

    def release(self) -> None:  # noqa: B027  # only one kind needs it
        """End the worker process after an error of the delivering thread, and drop the events sent to it."""

    def abandon_in_child(self) -> None:  # noqa: B027  # only one kind needs it
        """Stop using objects of the parent process, in a forked child process."""
