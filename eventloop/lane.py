"""One background subscriber: its bounded queue, what happens when that is full, and its account.

For every lane, at any moment, `accepted == delivered + failed + dropped + queued`; `queued` includes the
delivery under way.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any, Literal

import anyio

from eventloop.events import Event
from eventloop.filters import Passes

logger = logging.getLogger("eventloop")

Overflow = Literal["drop_oldest", "drop_newest", "latest", "block"]
OnError = Literal["disable", "log", "raise"]

_POLITE_SECONDS = 0.001
"""How long a lane's thread may hold the interpreter before it offers it to the training thread."""


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """How a background subscriber is fed; the words are those of `bus.on`.

    `on_flush` and `on_close` are called on the subscriber's own thread, after what was emitted before.
    """

    queue: int = 1024
    overflow: Overflow = "drop_oldest"
    on_error: OnError = "disable"
    stall_timeout: float = 60.0
    batch: bool = False
    on_flush: Callable[[], object] | None = None
    on_close: Callable[[], object] | None = None


class Lane(ABC):
    """The queue and the account; `TaskLane` and `ThreadLane` say what takes events out of it."""

    def __init__(self, name: str, fn: Callable[..., Any], options: LaneOptions, report: Report) -> None:
        self.name = name
        self.options = options
        self.buffer: deque[Event] = deque()
        self.accepted = self.delivered = self.failed = self.dropped = self.calls = self.peak = 0
        self.seconds = 0.0
        self.paused = False
        self.ended_by = ""  # why it takes no more events: "error", "stalled", "cancelled", "closed"
        self.last_error = ""
        self.closed = threading.Event()  # set after `on_close`
        self._fn = fn
        self._report = report
        self._capacity = 1 if options.overflow == "latest" else options.queue
        self._began = 0.0  # when the delivery under way began, 0.0 when there is none
        self._in_flight = 0
        self._closing = False
        self._flush_at: int | None = None
        self._flushed = threading.Event()
        self._account = threading.Lock()
        self._room = threading.Condition()

    @property
    def queued(self) -> int:
        """Accepted and not yet accounted for."""
        return self.accepted - self.delivered - self.failed - self.dropped

    @property
    def done(self) -> bool:
        """True when it takes no more events."""
        return bool(self.ended_by) or self.closed.is_set()

    # --- the router's side ---------------------------------------------------------------------------------

    def put(self, event: Event, passes: Passes | None) -> None:
        """Accept an event, applying the filter and the overflow policy. Never waits for the subscriber."""
        try:
            if self.paused or (passes is not None and not passes(event)):
                return
        except Exception as error:
            self.accepted += 1
            self._ended(1, 0.0, error)
            return
        with self._account:
            self.accepted += 1
            if self.done or (self._full() and not self._make_room()):
                self.dropped += 1
            else:
                self.buffer.append(event)
                self.peak = max(self.peak, len(self.buffer))

    def _full(self) -> bool:
        return len(self.buffer) >= self._capacity

    def _make_room(self) -> bool:
        if self.options.overflow == "drop_newest":
            return False
        if self.options.overflow != "block":  # there the producer has waited already
            try:
                self.buffer.popleft()
                self.dropped += 1
            except IndexError:  # the lane emptied its queue in between
                pass
        return True

    def put_or_wait(self, event: Event, passes: Passes | None, wake: Callable[[], None]) -> None:
        """overflow="block", on the producer's thread: accept an event once there is room for it."""
        self.wait_for_room(wake)
        self.put(event, passes)

    def wait_for_room(self, wake: Callable[[], None]) -> None:
        """Hold the caller while the queue is full. A lane that gives up or closes lets it go."""
        if self.queued < self._capacity or self.done:
            return
        wake()
        with self._room:
            self._room.wait_for(lambda: self.queued < self._capacity or self.done)

    def lose(self) -> None:
        """Charge the lane with an event that was dropped before it reached the queue."""
        with self._account:
            self.accepted += 1
            self.dropped += 1

    # --- draining and ending -------------------------------------------------------------------------------

    def flush_soon(self) -> None:
        """Ask the lane to run `on_flush` once all that was accepted so far is out of its queue."""
        self._flushed.clear()
        self._flush_at = self.accepted
        self.wake()

    def wait_flushed(self, timeout: float) -> bool:
        """Wait for that; False when it did not happen in time."""
        return self.done or self._flushed.wait(timeout)

    def close_soon(self) -> None:
        """Finish once the queue is empty."""
        self._closing = True
        self.wake()

    def wait_closed(self, timeout: float) -> bool:
        """Wait until the queue is empty and `on_close` has run; a stalled lane is not waited for."""
        return self.ended_by == "stalled" or self.closed.wait(timeout)

    def abandon(self) -> None:
        """Stop at the deadline of a close: what is queued stays in the account as left."""
        if not self.done:
            self.ended_by = "closed"
            self._notify()

    def give_up(self, reason: str) -> None:
        """Take no more events, count what is queued as dropped, and let nobody wait."""
        with self._account:
            if self.ended_by:
                return
            self.ended_by = reason
            self.dropped += len(self.buffer)
            self.buffer.clear()
        self._notify()

    def check_stall(self, now: float) -> None:
        """Give up a lane whose delivery has lasted longer than its `stall_timeout`."""
        began = self._began
        if not began or now - began <= self.options.stall_timeout or self.ended_by:
            return
        with self._account:
            if self._began != began:  # it ended in between
                return
            self.failed += self._in_flight
            self._in_flight = 0
        self.last_error = (
            f"subscriber {self.name} spent more than stall_timeout={self.options.stall_timeout:g} s on one "
            "delivery; it is no longer waited for"
        )
        logger.error("%s", self.last_error)
        self.give_up("stalled")
        self._report(self, TimeoutError(self.last_error), now - began)

    @abstractmethod
    def wake(self) -> None:
        """Let the lane look at its queue; safe from any thread."""

    def _notify(self) -> None:
        self._flushed.set()
        with self._room:
            self._room.notify_all()
        self.wake()

    # --- the lane's own side -------------------------------------------------------------------------------

    def _take(self) -> Event | list[Event] | None:
        """The next delivery, None when there is nothing to do."""
        with self._account:
            if not self.buffer or self.ended_by:
                return None
            if not self.options.batch:
                self._in_flight = 1
                self._began = perf_counter()
                return self.buffer.popleft()
            batch = list(self.buffer)
            self.buffer.clear()
            self._in_flight = len(batch)
            self._began = perf_counter()
            return batch

    def _delivered(self, error: BaseException | None) -> float:
        """Enter the delivery that just ended into the account; returns its seconds."""
        with self._account:
            took = perf_counter() - self._began
            count, self._in_flight, self._began = self._in_flight, 0, 0.0
        self._ended(count, took, error)
        self._flush_if_due()
        return took

    def _ended(self, count: int, took: float, error: BaseException | None) -> None:
        self.calls += 1
        self.seconds += took
        if error is None:
            self.delivered += count
        elif count:  # 0: it was counted when it stalled
            self.failed += count
            self._failure(error, took)
        if self.options.overflow == "block":
            with self._room:
                self._room.notify_all()

    def _failure(self, error: BaseException, took: float) -> None:
        self.last_error = f"{type(error).__name__}: {error}"
        disable, failures = self.options.on_error == "disable", self.failed
        if disable or failures & (failures - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            what = "and is disabled" if disable else f"({failures} failures so far)"
            logger.error("background subscriber %s failed %s", self.name, what, exc_info=error)
        if disable:
            self.give_up("error")
        self._report(self, error, took)

    def _flush_if_due(self) -> None:
        due = self._flush_at
        if due is not None and self.delivered + self.failed + self.dropped >= due:
            self._flush_at = None
            self._call_back(self.options.on_flush, "on_flush")
            self._flushed.set()

    def _finish(self) -> None:
        if self.ended_by != "stalled":
            self._call_back(self.options.on_close, "on_close")
        self.closed.set()
        self._flushed.set()

    def _call_back(self, callback: Callable[[], object] | None, what: str) -> None:
        if callback is None:
            return
        try:
            callback()
        except Exception as error:
            logger.exception("background subscriber %s failed in %s", self.name, what)
            self.last_error = f"{type(error).__name__}: {error} (in {what})"
            self._report(self, error, 0.0)


Report = Callable[[Lane, BaseException, float], None]
"""Told of each failure: the lane, the error, the seconds the delivery took."""


class TaskLane(Lane):
    """A coroutine function, run as a task of the background loop."""

    _fn: Callable[..., Awaitable[object]]

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        options: LaneOptions,
        report: Report,
        call_soon: Callable[[Callable[[], object]], None],
    ) -> None:
        super().__init__(name, fn, options, report)
        self._call_soon = call_soon
        self._ready: anyio.Event | None = None  # made on the loop
        self._scope: anyio.CancelScope | None = None

    def wake(self) -> None:
        """Let the task look at its queue; one that has ended is also torn out of its delivery."""
        self._call_soon(self._look)

    def _look(self) -> None:
        if self._ready is not None:
            self._ready.set()
        if self.ended_by in ("stalled", "cancelled", "closed") and self._scope is not None:
            self._scope.cancel()

    async def run(self) -> None:
        """Deliver until closed or given up."""
        while not self.ended_by:
            self._ready = anyio.Event()
            while (item := self._take()) is not None:
                await self._deliver(item)
            self._flush_if_due()
            if self.ended_by or (self._closing and not self.buffer):
                break
            await self._ready.wait()
        self._finish()

    async def _deliver(self, item: Event | list[Event]) -> None:
        failure: BaseException | None = None
        with anyio.CancelScope() as self._scope:
            try:
                await self._fn(item)
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                # a SystemExit in a subscriber is its own affair: let through, it would end the whole loop
                failure = error
        if self._scope.cancelled_caught:
            failure = TimeoutError(f"subscriber {self.name} was {self.ended_by} during a delivery")
        self._scope = None
        self._delivered(failure)


class ThreadLane(Lane):
    """A plain function, run on a daemon thread of its own: one that hangs can be left behind.

    anyio's worker threads are no daemons, so a hung one would keep the interpreter from exiting.
    """

    def __init__(self, name: str, fn: Callable[..., Any], options: LaneOptions, report: Report) -> None:
        super().__init__(name, fn, options, report)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"eventloop {name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Let the thread look at its queue."""
        self._ready.set()

    def _run(self) -> None:
        while not self.ended_by:
            self._ready.clear()
            held = 0.0
            while (item := self._take()) is not None:
                held += self._deliver(item)
                if held > _POLITE_SECONDS:
                    held = 0.0
                    sleep(0)  # lets go of the interpreter lock; it does not wait
            self._flush_if_due()
            if self.ended_by or (self._closing and not self.buffer):
                break
            self._ready.wait()
        self._finish()

    def _deliver(self, item: Event | list[Event]) -> float:
        try:
            self._fn(item)
        except BaseException as error:  # a SystemExit in a subscriber is its own affair
            return self._delivered(error)
        return self._delivered(None)
