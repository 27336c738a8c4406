"""Call the `when=` filter of one subscriber on a thread of its own, because the user's code may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from eventloop.background.queues.inbox import Inbox
from eventloop.background.threads import BackgroundThread
from eventloop.events import Event
from eventloop.events.deferred import unstamped
from eventloop.util.waiting import Bell, Latch

HANGS_SECONDS = 0.05
"""The seconds after which a call of `when=` counts as hanging, so that a caller no longer waits for it."""


class FilterCall(NamedTuple):
    """A call of `when=` that has not returned."""

    began: float
    """The time at which the call began, by `perf_counter`."""
    event: Event


class WhenFilter:
    """A daemon thread that calls `when=` for incoming events, and moves those that pass into the queue.

    Args:
        inbox: the inbox with the events, and with the filters in its `routes`.
        wake: wakes the subscriber, because its queue has an event.
        fail: called with an error of the filter, and the event, which counts as failed.
    """

    def __init__(
        self, inbox: Inbox, wake: Callable[[], None], fail: Callable[[BaseException, Event], None]
    ) -> None:
        self.call: FilterCall | None = None  # the call under way
        self._inbox, self._account = inbox, inbox.account
        self._wake_subscriber, self._fail = wake, fail
        self._calls_begun = self._calls_ended = 0  # the numbers of calls of `when=`
        self._all_checked = Bell()  # rings when the filter was called for all incoming events, and at the end
        self._woken = Latch()
        self._starting = threading.Lock()
        name = f"eventloop when= of {inbox.account.name}"
        self._thread = BackgroundThread(target=self._run, name=name, daemon=True)
        inbox.wake_filter = self.wake

    def wake(self) -> None:
        """Wake the thread because there are events, and start it at the first call; safe from any thread."""
        with self._starting:
            if self._thread.ident is None and not self._account.done:
                self._thread.start()
        self._woken.set()

    @property
    def ended(self) -> bool:
        """Return whether the thread has ended, by an error or because the subscriber has ended."""
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
            target = self._calls_begun + self._inbox.waiting()  # the number of calls to wait for
        call = self.call
        if self._calls_ended >= target or self._account.done:
            return True
        if not patient and call is not None and perf_counter() - call.began > HANGS_SECONDS:
            return False
        self.wake()
        return self._all_checked.wait_for(lambda: self._calls_ended >= target or self._account.done, timeout)

    def give_up_call(self, since: float) -> FilterCall | None:
        """Count the event of the call under way as failed, if the call began before `since`.

        Returns:
            the call; None if there is no such call.
        """
        with self._account.lock:
            call = self.call
            if call is None or call.began > since:
                return None
            self.call = None
            self._account.failed += 1
        return call

    def _run(self) -> None:
        """Call the filter for the incoming events at each `wake`, until the subscriber ends."""
        while not self._account.done:
            self._woken.clear()
            with self._inbox.moving:  # the lock of the thread that moves events into the queue
                while self._check_next():
                    self._calls_ended += 1
            self._all_checked.ring()
            self._woken.wait()
        self._all_checked.ring()

    def _check_next(self) -> bool:
        """Call `when=` for the next event, and move the event into the queue if it passes.

        Return False if there is no event.
        """
        account = self._account
        with account.lock:
            if account.done or (item := self._inbox.next_incoming()) is None:
                return False
            account.received += 1
            self._calls_begun += 1
            call = self.call = FilterCall(perf_counter(), unstamped(item))
        if self._passes(call):
            self._inbox.store(item)
            self._wake_subscriber()
        return True

    def _passes(self, call: FilterCall) -> bool:
        """Return whether the event of a call passes `when=`.

        If it does not pass, it is no longer counted as received. If `when=` raises an error, the event counts
        as failed. The result is False if `give_up_call` or the end of the subscriber has counted the event
        meanwhile.
        """
        event, account = call.event, self._account
        route = self._inbox.routes.get(type(event))
        failure: BaseException | None = None
        try:
            passes = route is None or route.late is None or bool(route.late(event))
        except BaseException as error:
            passes, failure = False, error
        with account.lock:
            was_given_up, self.call = self.call is not call, None
            if was_given_up or account.ended_by:
                return False
            account.failed += failure is not None
            account.received -= not passes and failure is None
        if failure is not None:
            self._fail(failure, event)
        return passes
