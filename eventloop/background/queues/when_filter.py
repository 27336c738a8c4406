"""Call the `when=` filter of one subscriber on a thread of its own, because the user's code may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter

from eventloop.background.queues.inbox import Inbox
from eventloop.background.threads import BackgroundThread
from eventloop.events import Event
from eventloop.events.deferred import unstamped
from eventloop.util.waiting import Bell, Latch

HANGS_SECONDS = 0.05
"""The seconds after which a running `when=` call counts as hanging, and is no longer waited for."""


class WhenFilter:
    """A daemon thread that calls `when=` for incoming events, and moves those that pass into the queue.

    Args:
        inbox: has the events; their types are in its `routes`.
        wake: makes the subscriber look at the queue.
        fail: reports an error of the filter, for an event that is counted as failed.
    """

    def __init__(
        self, inbox: Inbox, wake: Callable[[], None], fail: Callable[[BaseException, Event], None]
    ) -> None:
        self.call: tuple[float, Event] | None = None  # begin and event of the running call
        self._inbox, self._account = inbox, inbox.account
        self._wake_subscriber, self._fail = wake, fail
        self._begun = self._done = 0  # the numbers of calls
        self._checked = Bell()  # rings when the filter was called for all waiting events
        self._woken = Latch()
        self._starting = threading.Lock()
        name = f"eventloop when= of {inbox.account.name}"
        self._thread = BackgroundThread(target=self._run, name=name, daemon=True)
        inbox.wake_filter = self.wake

    def wake(self) -> None:
        """Make the thread look for events, and start it at the first call; safe from any thread."""
        with self._starting:
            if self._thread.ident is None and not self._account.done:
                self._thread.start()
        self._woken.set()

    @property
    def ended(self) -> bool:
        """Return whether the thread has ended, because the subscriber has, or by an error."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def wait(self, timeout: float, *, patient: bool = False) -> bool:
        """Wait until `when=` was called for each event emitted so far; return False on a timeout.

        Args:
            timeout: seconds to wait at most.
            patient: whether to wait even for a call that hangs.
        """
        if threading.current_thread() is self._thread:
            return True
        with self._account.lock:
            target = self._begun + self._inbox.waiting()
        call = self.call
        if self._done >= target or self._account.done:
            return True
        if not patient and call is not None and perf_counter() - call[0] > HANGS_SECONDS:
            return False
        self.wake()
        return self._checked.wait_for(lambda: self._done >= target or self._account.done, timeout)

    def give_up_call(self, since: float) -> tuple[float, Event] | None:
        """Count a call as failed that began before `since`; return its begin and event; None without one."""
        with self._account.lock:
            call = self.call
            if call is None or call[0] > since:
                return None
            self.call = None
            self._account.failed += 1
        return call

    def _run(self) -> None:
        while not self._account.done:
            self._woken.clear()
            with self._inbox.moving:
                while self._check_next():
                    self._done += 1
            self._checked.ring()
            self._woken.wait()
        self._checked.ring()

    def _check_next(self) -> bool:
        """Call `when=` for the next event; return False if there is none."""
        account = self._account
        with account.lock:
            if account.done or (item := self._inbox.next_incoming()) is None:
                return False
            account.received += 1
            self._begun += 1
            call = self.call = perf_counter(), unstamped(item)
        if self._passes(call):
            self._inbox.store(item)
            self._wake_subscriber()
        return True

    def _passes(self, call: tuple[float, Event]) -> bool:
        """Return whether an event passes `when=`, and count an event that does not.

        A rejected event is removed from the account; if `when=` raises, the event has failed. Nothing is
        counted if the call was given up as too long, or if the subscriber has ended during it: then the event
        was counted at that time.
        """
        event, account = call[1], self._account
        route = self._inbox.routes.get(type(event))
        failure: BaseException | None = None
        try:
            passes = route is None or route.late is None or bool(route.late(event))
        except BaseException as error:
            passes, failure = False, error
        with account.lock:
            given_up, self.call = self.call is not call, None
            if given_up or account.ended_by:
                return False
            account.failed += failure is not None
            account.received -= not passes and failure is None
        if failure is not None:
            self._fail(failure, event)
        return passes
