"""Take events out of a queue and deliver them, in a task of an event loop or on a thread.

`eventloop.background.background` creates one such object for each subscriber.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from time import perf_counter, sleep
from typing import Any

from eventloop.background.gil_scheduler import HOLD_SECONDS, Pace
from eventloop.background.held_loop import LoopLane
from eventloop.background.queues.failures import Report
from eventloop.background.queues.options import LaneOptions
from eventloop.background.queues.queue import Delivery
from eventloop.background.queues.subscriber import Lane
from eventloop.background.threads import BackgroundThread
from eventloop.events import Event
from eventloop.events.deferred import Timed
from eventloop.processes.cpu_time import of_thread
from eventloop.util.text import error_text
from eventloop.util.waiting import Latch

logger = logging.getLogger("eventloop")

_IDLE_SECONDS = 1.0
"""The interval in seconds at which a thread looks at its queue without being woken.

The keeper, which normally wakes it, may be waiting for a slow disk.
"""


class TaskLane(LoopLane):
    """Deliver to a coroutine function in a task of an event loop.

    Events stay in the queue while that loop is busy. Only the delivery itself counts for `stall_timeout`, and
    not the time in which another coroutine holds the loop, by `time.sleep` for example.

    Args:
        loop: the bus's event loop, or a loop of the caller; None in a dry run.
    """

    runs_on = "loop"
    _fn: Callable[..., Awaitable[object]]
    _shared = True  # whether the loop is the bus's own, which other coroutine subscribers have, too
    _cure = "A task of a coroutine subscriber has raised SystemExit or KeyboardInterrupt"

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        options: LaneOptions,
        report: Report,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        super().__init__(name, fn, options, report)
        self._loop = loop
        self._ready = asyncio.Event()
        self._delivering = False

    def start(self) -> None:
        """Create the task, in the context of the caller."""
        self._call_on_loop(self._make_task)

    def _make_task(self) -> None:
        assert self._loop is not None
        self._task = self._loop.create_task(self._serve(), name=f"eventloop {self.name}")

    def wake(self) -> None:
        """Make the task look at its queue, or cancel its delivery if the subscriber has ended."""
        self._called_at = self._called_at or perf_counter()  # `_look` answers
        self._call_on_loop(self._look)

    def _look(self) -> None:
        self._note_answer()
        self._ready.set()
        if (
            self._delivering
            and self.ended_by in ("stalled", "cancelled", "closed")
            and self._task is not None
        ):
            self._task.cancel()

    def _call_on_loop(self, fn: Callable[[], object]) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(fn)
        except RuntimeError:  # it was closed
            self._end_with_loop()

    def forget(self) -> None:
        """Note that the task is the parent's; asyncio would warn about it when the child frees it."""
        super().forget()
        if self._task is not None:
            self._task._log_destroy_pending = False  # type: ignore[attr-defined]

    async def _serve(self) -> None:
        try:
            await self._run()
            self._finish()
        except (asyncio.CancelledError, GeneratorExit):  # a loop cancels every task at its end
            self._end_with_loop()
            raise
        except BaseException as error:
            self.break_off(error)
        finally:
            self._task = None  # the task holds this coroutine, and so the queue

    async def _run(self) -> None:
        while not self.ended_by:
            self._ready.clear()
            held = perf_counter()
            while (item := self._next_delivery()) is not None:
                await self._deliver(item)
                if perf_counter() - held > HOLD_SECONDS:  # perhaps of a coroutine that awaits nothing
                    await asyncio.sleep(0)
                    held = perf_counter()
            self._flush_if_due()
            if self.ended_by or (self._no_more and not self.queued):
                return
            await self._ready.wait()

    async def _deliver(self, item: Delivery | list[Timed]) -> None:
        failure: BaseException | None = None
        self._delivering = True
        try:
            await self._fn(item)
        except BaseException as error:
            if self._torn_out(error):
                if not self.ended_by:
                    raise
                failure = TimeoutError(f"subscriber {self.name} was {self.ended_by} during a delivery")
            else:  # a SystemExit in a subscriber is its own affair: let through, it would end the whole loop
                failure = error
        finally:
            self._delivering = False
        self._delivered(failure)

    def _torn_out(self, error: BaseException) -> bool:
        """Return whether an error came from the event loop, and not from the subscriber's code.

        The loop cancels this task, or throws GeneratorExit into a coroutine whose task is gone. A
        CancelledError of something that the subscriber awaited is an ordinary error of the subscriber.
        """
        running = _current_task()
        if isinstance(error, GeneratorExit):
            return running is None or running is not self._task
        cancelled = isinstance(error, asyncio.CancelledError)
        return cancelled and running is not None and running.cancelling() > 0

    def _check_runner(self) -> None:
        super()._check_runner()
        if self._loop is not None and self._loop.is_closed() and not self.closed.is_set():
            self._end_with_loop()

    def _end_with_loop(self) -> None:
        """Take no more events; the interrupted delivery counts as failed, and queued events as dropped.

        Does nothing after a close, which ends the bus's own loop.
        """
        with self._lock:
            if self.ended_by or self.closed.is_set():
                self.closed.set()
                return
            self.ended_by = "error"  # emitting threads find a closed loop at the same time
            self.failed += self._in_flight
            left, self._in_flight, self._began = self._queued() + self._in_flight, 0, 0.0
            self._drop_late()
            self.dropped += self._queued()
            self.buffer.clear()
        error = RuntimeError(f"the event loop of subscriber {self.name} has ended")
        self.last_error = error_text(error)
        if left or self._shared:
            logger.error("%s: %d events are counted as failed or dropped. %s", error, left, self._cure)
            self._report(self, error, None, 0.0)
        self._spill.discard()
        self.closed.set()
        for flush in tuple(self._flushes):
            flush.made.set()
        self._room.ring()


class CallersLane(TaskLane):
    """Deliver in a task of an event loop that the caller runs, and that the bus neither starts nor stops."""

    _shared = False
    _cure = (
        "Flush the bus before the loop ends, and let the loop run meanwhile: "
        "`await asyncio.to_thread(bus.flush)`"
    )

    @property
    def blocked_by_caller(self) -> bool:
        """Return whether nothing can be delivered while the calling thread waits.

        True if the calling thread runs the event loop, or if no thread runs it.
        """
        return self._loop is None or _running_loop() is self._loop or not self._loop.is_running()

    @property
    def stuck(self) -> str:
        """Describe why events wait: the calling thread blocks their event loop, or no thread runs it."""
        if self.ended_by not in ("", "closed") or not (self.queued and self.blocked_by_caller):
            return super().stuck
        if _running_loop() is self._loop:
            return (
                "its event loop could not run during this call: `await asyncio.to_thread(trainer.train)`, or "
                "`asyncio.to_thread(bus.close)`, leaves it free"
            )
        return "its event loop does not run"


def _running_loop() -> asyncio.AbstractEventLoop | None:
    with suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


def _current_task() -> asyncio.Task[Any] | None:
    with suppress(RuntimeError):  # no loop runs
        return asyncio.current_task()
    return None


RUN = 256
"""The number of events that a thread takes out of its queue together if deliveries are short."""


class ThreadLane(Lane):
    """Deliver to a plain function on its own daemon thread, which can be abandoned if it hangs.

    anyio's worker threads are not daemons: a hung one would keep the interpreter from exiting.
    """

    runs_on = "thread"
    _thread: BackgroundThread

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
        self._fast = False  # whether deliveries are short enough to be counted together
        self._thread = BackgroundThread(target=self._run, name=f"eventloop {name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Make the thread look at its queue."""
        self._ready.set()

    def cpu_time(self) -> float:
        """Return the CPU time of the thread in seconds."""
        native_id = self._thread.native_id
        return of_thread(native_id) if native_id is not None else 0.0

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # must be reported, because a close waits for this thread
            self.break_off(error)
        else:
            self._finish()

    def _serve(self) -> None:
        while not self.ended_by:
            self._ready.clear()
            held = inf  # the first delivery waits for its turn too
            while (self.incoming or self.buffer or self._spill.count) and not self.ended_by:
                if self._gathers():
                    break
                if held > HOLD_SECONDS:
                    self._wait_for_turn()
                    held = 0.0
                if self._fast and self._may_run:
                    if not (events := self._take(RUN)):
                        break
                    took = self._deliver_run(events)
                    self._fast = took < HOLD_SECONDS
                    self._flush_if_due()
                else:
                    if (item := self._next_delivery()) is None:
                        break
                    took = self._deliver(item)
                    self._fast = took < HOLD_SECONDS / RUN
                held += took
            self._flush_if_due()
            if self.ended_by or (self._no_more and not self.queued):
                return
            self._ready.wait(_IDLE_SECONDS)

    @property
    def _may_run(self) -> bool:
        """Return whether single events may be delivered in a row and counted together."""
        single = self._spills and not self.options.most
        return single and self.recorder is None and self.busy.budget is None

    def _wait_for_turn(self) -> None:
        """Wait for this thread's next turn, so that other threads can run Python code until then.

        If a flush or close waits, or events come faster than they are delivered, only yield to other threads
        once.
        """
        if self._in_a_hurry():
            sleep(0.0)
            return
        until = perf_counter() + self._pace.next_turn()
        while (left := until - perf_counter()) > 0:
            self._ready.clear()
            if self._in_a_hurry():  # checked after the clear, so that no wake-up is missed
                return
            self._ready.wait(left)

    def _deliver(self, item: Delivery | list[Timed]) -> float:
        try:
            self._fn(item)
        except BaseException as error:  # a SystemExit in a subscriber is its own affair
            return self._delivered(error)
        return self._delivered(None)

    def _deliver_run(self, events: list[Event]) -> float:
        """Deliver single events in a row, and count all of them together; return the seconds.

        A delivery takes 0.3 us in this way, and 3 us when counted by itself (`benchmarks.throughput`).
        """
        fn, progress, clock = self._fn, self._progress, perf_counter
        failure: BaseException | None = None
        began = now = self._began = clock()
        longest = 0.0
        try:
            for event in events:
                fn(event)
                progress[0] += 1
                then, now = now, clock()
                if now - then > longest:  # noqa: PLR1730  # max() takes 60 ns more
                    longest = now - then
                self._began = now
                if self.ended_by:
                    break
        except BaseException as error:  # a SystemExit in a subscriber is its own affair
            failure = error
        return self._ran(events, progress, began, longest, failure)

    def _ran(
        self, events: list[Event], progress: list[int], began: float, longest: float,
        failure: BaseException | None,
    ) -> float:  # fmt: skip
        now, done = perf_counter(), progress[0]
        with self._lock:
            self._began = 0.0
            if self._progress is not progress:  # counted already when it stalled
                return now - began
            self._progress = [0]
            self.delivered += done
            self.calls += done + (failure is not None)
            self.seconds += now - began
            if failure is not None:
                self._charge(failure, 1)
            rest = events[done + (failure is not None) :]
            self._in_flight = len(rest)
            if rest and self.ended_by:
                self._in_flight = 0
                self.dropped += len(rest)
        if done:
            self.busy.add_run(done, now - began, longest)
        if failure is not None:
            self._failure(failure, events[done], now - began)
        self._put_back(rest)
        return now - began

    def _put_back(self, rest: list[Event]) -> None:
        """Put the events after a failed one back, or count them as dropped if the subscriber has ended."""
        with self._lock:
            if not self._in_flight:
                return
            self._in_flight -= len(rest)
            if self.ended_by:
                self.dropped += len(rest)
            else:
                self.buffer.extendleft(reversed(rest))
