"""Take events out of a queue and deliver them: in a task of an event loop, or on a thread.

`eventloop.background.loop` makes one for each subscriber.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from math import inf
from time import perf_counter, sleep
from typing import Any

import anyio

from eventloop.background.gil_scheduler import HOLD_SECONDS, Pace
from eventloop.background.queues.options import LaneOptions
from eventloop.background.queues.queue import Delivery
from eventloop.background.queues.subscriber import Lane, Report
from eventloop.util.text import error_text
from eventloop.util.waiting import Latch

logger = logging.getLogger("eventloop")


class TaskLane(Lane):
    """Deliver to a coroutine function in a task of the background loop."""

    runs_on = "loop"
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
        self._task: asyncio.Task[Any] | None = None

    def wake(self) -> None:
        """Make the task look at its queue; cancel its delivery if the subscriber has been ended."""
        self._call_soon(self._look)

    def _look(self) -> None:
        if self._ready is not None:
            self._ready.set()
        if self.ended_by in ("stalled", "cancelled", "closed") and self._scope is not None:
            self._scope.cancel()

    async def run(self) -> None:
        """Deliver until the queue is closed or given up."""
        self._task = _current_task()
        while not self.ended_by:
            self._ready = anyio.Event()
            held = perf_counter()
            while (item := self._take()) is not None:
                await self._deliver(item)
                if perf_counter() - held > HOLD_SECONDS:  # perhaps of a coroutine that awaits nothing
                    await asyncio.sleep(0)
                    held = perf_counter()
            self._flush_if_due()
            if self.ended_by or (self._no_more and not self.buffer):
                break
            if self._closing:
                self.doorbell.ring()
            await self._ready.wait()
        self._finish()
        self._task = None  # which holds this coroutine, and so the lane

    async def _deliver(self, item: Delivery) -> None:
        failure: BaseException | None = None
        before = self.doorbell.newest()
        with anyio.CancelScope() as self._scope:
            try:
                await self._fn(item)
            except BaseException as error:
                # a SystemExit in a subscriber is its own affair: let through, it would end the whole loop
                if self._torn_out(error):
                    raise
                failure = error
        if self._scope.cancelled_caught:
            failure = TimeoutError(f"subscriber {self.name} was {self.ended_by} during a delivery")
        self._scope = None
        self.doorbell.look(before)
        self._delivered(failure)

    def _torn_out(self, error: BaseException) -> bool:
        """Return whether an error was thrown in by the loop rather than raised by the subscriber.

        That is a cancellation of this task, and the end of a coroutine that no task runs any more. A
        cancellation that the subscriber awaited is a failure like any other.
        """
        running = _current_task()
        if isinstance(error, GeneratorExit):
            return running is None or running is not self._task
        cancelled = isinstance(error, asyncio.CancelledError)
        return cancelled and running is not None and running.cancelling() > 0


class CallersLane(TaskLane):
    """Deliver to a coroutine function in a task of an event loop that the caller runs.

    What waits while that loop is busy waits in the queue; only the delivery itself counts for
    `stall_timeout`.

    Args:
        loop: the caller's loop, which the bus neither starts nor stops.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        options: LaneOptions,
        report: Report,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(name, fn, options, report, self._call_on_loop)
        self._loop = loop
        self._loop_ended = False

    def start(self) -> None:
        """Make the task, in the context of the caller."""
        self._call_on_loop(lambda: setattr(self, "_task", self._loop.create_task(self._serve())))

    @property
    def blocked_by_caller(self) -> bool:
        """Return whether nothing is delivered while this thread waits.

        True if this thread runs the loop itself, or no thread does.
        """
        return _running_loop() is self._loop or not self._loop.is_running()

    @property
    def stuck(self) -> str:
        """Name the reason why events wait, if it is this thread or a loop that does not run."""
        if self.ended_by not in ("", "closed") or not (self.queued and self.blocked_by_caller):
            return super().stuck
        if _running_loop() is self._loop:
            return (
                "its event loop could not run during this call: `await asyncio.to_thread(trainer.train)`, or "
                "`asyncio.to_thread(bus.close)`, leaves it free"
            )
        return "its event loop does not run"

    def _call_on_loop(self, fn: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(fn)
        except RuntimeError:  # it was closed
            self._end_with_loop()

    async def _serve(self) -> None:
        try:
            await self.run()
        except (asyncio.CancelledError, GeneratorExit):  # as `asyncio.run` does with every task at its end
            self._end_with_loop()
            raise
        except BaseException as error:
            self.break_off(error)

    def _end_with_loop(self) -> None:
        """Take no more events; count the delivery that was cut short as failed, and what waits as dropped."""
        with self._account:
            if self.ended_by or self._loop_ended or self.closed.is_set():
                return
            self._loop_ended = True  # emitting threads find a closed loop at the same time
            self.failed += self._in_flight
            left, self._in_flight, self._began = self.queued + self._in_flight, 0, 0.0
        error = RuntimeError(f"the event loop of subscriber {self.name} has ended")
        self.last_error = error_text(error)
        if left:
            logger.error(
                "%s: %d events are counted as failed or dropped. Flush the bus before the loop ends, and let "
                "the loop run meanwhile: `await asyncio.to_thread(bus.flush)`", error, left,
            )  # fmt: skip
            self._report(self, error, None, 0.0)
        self.give_up("error")
        self.closed.set()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs
        return None


class ThreadLane(Lane):
    """Deliver to a plain function on a daemon thread of its own, which can be abandoned if it hangs.

    anyio's worker threads are not daemons: a hung one would keep the interpreter from exiting.
    """

    runs_on = "thread"

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        options: LaneOptions,
        report: Report,
        pace: Pace,
    ) -> None:
        super().__init__(name, fn, options, report)
        self._pace = pace
        self._ready = Latch()
        self._newest = self.doorbell.newest()  # when this turn began
        self._thread = threading.Thread(target=self._run, name=f"eventloop {name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Make the thread look at its queue."""
        self._ready.set()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # else nobody would hear of it, and a close would wait for this thread
            self.break_off(error)
        else:
            self._finish()

    def _serve(self) -> None:
        while not self.ended_by:
            self._ready.clear()
            self._newest = self.doorbell.newest()
            held = inf  # the first delivery waits for its turn too
            while self.queued and not self.ended_by:
                if held > HOLD_SECONDS:
                    self._look_back()
                    self._wait_for_turn()
                    self._newest = self.doorbell.newest()
                    held = 0.0
                if (item := self._take()) is None:
                    break
                held += self._deliver(item)
            self._look_back()
            self._flush_if_due()
            if self.ended_by or (self._no_more and not self.buffer):
                break
            if self._closing:
                self.doorbell.ring()
            self._ready.wait()

    def _wait_for_turn(self) -> None:
        """Leave the interpreter to other threads until the next turn; in a hurry only release it once."""
        if self._in_a_hurry():
            sleep(0.0)
            return
        until = perf_counter() + self._pace.next_turn()
        while (left := until - perf_counter()) > 0:
            self._ready.clear()
            if self._in_a_hurry():  # asked after the clear: what comes between sets it again
                return
            self._ready.wait(left)

    def _in_a_hurry(self) -> bool:
        """Return whether a flush or close waits for the queue, or it grows faster than it is delivered."""
        wanted = self._closing or bool(self._flushes) or bool(self.ended_by)
        return wanted or len(self.buffer) > self._capacity // 4 or self._spill.count > 0

    def _deliver(self, item: Delivery) -> float:
        try:
            self._fn(item)
        except BaseException as error:  # a SystemExit in a subscriber is its own affair
            self._look_back()  # first: who waits for a lane that fails goes on at once
            return self._delivered(error)
        return self._delivered(None)

    def _flush(self, number: int, *, calls: bool) -> None:
        self._look_back()
        super()._flush(number, calls=calls)

    def _look_back(self) -> None:
        """Wake the loop for events emitted by the deliveries of this turn."""
        self.doorbell.look(self._newest)
        self._newest = self.doorbell.newest()
