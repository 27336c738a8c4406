"""Deliver to a coroutine function in a task of an event loop."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from time import perf_counter, sleep
from typing import Any

from eventloop.background.queues import awaited
from eventloop.background.queues.runner import Delivery, Runner
from eventloop.background.queues.subscriber import Subscriber
from eventloop.background.runners.thread_runner import HOLD_SECONDS
from eventloop.events.deferred import Timed
from eventloop.util.text import StoppedError, error_text

logger = logging.getLogger("eventloop")

_CURE = 'make it a plain function with offload="thread", or await in it what takes long'
_RAISED = "A task of a coroutine subscriber has raised SystemExit or KeyboardInterrupt"
_ENDED = (
    "Flush the bus before the loop ends, and let the loop run meanwhile: `await asyncio.to_thread(bus.flush)`"
)
_BLOCKED = (
    "its event loop could not run during this call: `await asyncio.to_thread(trainer.train)`, or "
    "`asyncio.to_thread(bus.close)`, leaves it free"
)


class TaskRunner(Runner):
    """Deliver in a task of an event loop.

    Events stay in the queue while the loop is busy. The time in which another coroutine blocks the loop, for
    example by `time.sleep`, does not count for `stall_timeout`.

    Args:
        subscriber: the subscriber with the events.
        loop: the bus's event loop, or a loop of the program; None in a dry run.
        callers: whether the loop is the program's, so that the bus neither starts nor stops it.
    """

    runs_on = "loop"

    def __init__(
        self, subscriber: Subscriber, loop: asyncio.AbstractEventLoop | None, *, callers: bool = False
    ) -> None:
        super().__init__(subscriber.fn, subscriber.options.most, subscriber.account, subscriber.inbox)
        self.subscriber = subscriber
        self._loop, self._callers = loop, callers
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._delivering = False
        self._called_at = 0.0  # when `_answer` was scheduled and has not run yet; 0.0 if it has
        self._free_at = 0.0  # when the loop last ran again after another coroutine had blocked it
        self._checked = 0.0  # the begin of the delivery for which `overdue` last tested the loop

    # --- any thread ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Create the task, in the context of the caller."""
        self._call_on_loop(self._make_task)

    def wake(self) -> None:
        """Wake the task because its queue has events, or cancel its delivery if the subscriber has ended."""
        self._called_at = self._called_at or perf_counter()  # `_answer` resets it
        self._call_on_loop(self._answer)

    def _call_on_loop(self, fn: Any) -> None:
        """Call a function on the event loop, from any thread; end the subscriber if the loop is closed."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(fn)
        except RuntimeError:  # the loop is closed
            self._end_with_loop()

    @property
    def blocked_by_caller(self) -> bool:
        """Return whether nothing can be delivered while the calling thread waits.

        True if the event loop is the program's, and either the calling thread runs it or no thread does.
        """
        loop = self._loop
        return self._callers and (loop is None or _running_loop() is loop or not loop.is_running())

    def obstacle(self) -> str:
        """Name the coroutine that holds the event loop, or say that the caller does not run the loop."""
        if self.blocked_by_caller and self.subscriber.queued:
            return _BLOCKED if _running_loop() is self._loop else "its event loop does not run"
        seconds = self._blocked_seconds(perf_counter())
        running_task = _task_that_runs(self._loop)
        if running_task is None or running_task is self._task or seconds < awaited.STUCK_SECONDS:
            return ""
        name = running_task.get_name().removeprefix("eventloop ")
        return f"its event loop was held for {seconds:.1f} s by {name}, for which this is the cure: {_CURE}"

    def stall_effect(self) -> str:
        """Return a sentence if the stalled coroutine blocks the event loop for all other ones, else ""."""
        return f". It holds the event loop of other coroutines: {_CURE}" if self._blocks_loop else ""

    def overdue(self, now: float, limit: float) -> bool:
        """Return whether the current call exceeds `limit`; False while another coroutine blocks the loop."""
        began = self.began
        if not began or now - max(began, self._free_at) <= limit:
            return False
        if self.callback or self._blocks_loop:
            return True
        if self._checked != began:  # test whether the loop runs; the result is known at the next call
            self._checked = began
            self.wake()
        return not self._called_at

    def check_loop(self) -> None:
        """End the subscriber if its event loop was closed."""
        if self._loop is not None and self._loop.is_closed() and not self.subscriber.closed.is_set():
            self._end_with_loop()

    def abandon_in_child(self) -> None:
        """Suppress asyncio's warning about a pending task, because the parent process still runs the task."""
        if self._task is not None:
            self._task._log_destroy_pending = False  # type: ignore[attr-defined]

    @property
    def _blocks_loop(self) -> bool:
        """Return whether the subscriber's own code runs on the loop now, so that no other coroutine can."""
        task = self._task
        return task is not None and _task_that_runs(self._loop) is task

    def _blocked_seconds(self, now: float) -> float:
        """Return the seconds for which the loop has not run `_answer`; 0.0 if it has."""
        return now - self._called_at if self._called_at else 0.0

    # --- the event loop ------------------------------------------------------------------------------------

    def _make_task(self) -> None:
        assert self._loop is not None
        self._task = self._loop.create_task(self._run(), name=f"eventloop {self.subscriber.name}")

    def _answer(self) -> None:
        """Record that the loop runs, and wake the task; cancel its delivery if the subscriber has ended."""
        now = perf_counter()
        if self._blocked_seconds(now) > awaited.STUCK_SECONDS:
            self._free_at = now
        self._called_at = 0.0
        self._ready.set()
        # after an "error" of another part, such as `when=`, the delivery may complete
        ended = self.account.ended_by in ("stalled", "cancelled", "closed")
        if self._delivering and ended and self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        """Deliver events until the subscriber or its event loop ends."""
        subscriber = self.subscriber
        try:
            await self._deliver_all()
            subscriber.finish()
        except (asyncio.CancelledError, GeneratorExit):
            # the event loop ends: asyncio cancels its tasks, or Python closes the coroutine of a lost task
            self._end_with_loop()
            raise
        except BaseException as error:
            subscriber.break_off(error)
        finally:
            self._task = None  # so that the queue can be freed, to which the task refers by this coroutine

    async def _deliver_all(self) -> None:
        """Deliver events, and wait for more events, until the subscriber ends."""
        subscriber, account = self.subscriber, self.account
        while not account.ended_by:
            self._ready.clear()
            turn_began = perf_counter()
            while (item := subscriber.next_delivery()) is not None:
                await self._deliver(item)
                # let other threads and coroutines run, because the coroutine function may await nothing
                if perf_counter() - turn_began > HOLD_SECONDS:
                    _yield_interpreter()
                    await asyncio.sleep(0)
                    turn_began = perf_counter()
            subscriber.flush_if_due()
            if account.ended_by or (subscriber.no_more and not subscriber.queued):
                return
            await self._ready.wait()

    async def _deliver(self, item: Delivery | list[Timed]) -> None:
        """Await the coroutine function for an event or a batch, and count the delivery."""
        subscriber = self.subscriber
        failure: BaseException | None = None
        self._delivering = True
        try:
            await self.fn(item)
        except BaseException as error:
            if self._comes_from_loop(error):
                if not (ended := self.account.ended_by):  # the event loop itself ends
                    raise
                # `_answer` has cancelled the delivery, because the subscriber has ended
                failure = StoppedError(f"subscriber {subscriber.name} was {ended} during a delivery")
            else:
                # not raised again, because a SystemExit would end the event loop of all coroutine subscribers
                failure = error
        finally:
            self._delivering = False
        subscriber.end_delivery(failure)

    def _comes_from_loop(self, error: BaseException) -> bool:
        """Return whether an error came from the event loop, and not from the subscriber's code.

        The loop cancels this task, or throws GeneratorExit into a coroutine whose task is gone. A
        CancelledError of something that the subscriber awaited is an ordinary error of the subscriber.
        """
        running_task = _current_task()
        if isinstance(error, GeneratorExit):
            return running_task is None or running_task is not self._task
        is_cancelled = isinstance(error, asyncio.CancelledError)
        return is_cancelled and running_task is not None and running_task.cancelling() > 0

    def _end_with_loop(self) -> None:
        """End the subscriber because its event loop has ended; do nothing after a close.

        The events of the interrupted delivery count as failed, and the queued events as dropped.
        """
        subscriber, account, inbox = self.subscriber, self.account, self.inbox
        with account.lock:
            if account.ended_by or subscriber.closed.is_set():
                subscriber.closed.set()
                return
            account.ended_by = "error"  # with the lock, because several threads may find the loop closed
            queued = inbox.queued()
            account.failed += account.end_run()
            self.began = 0.0
            inbox.drop_late()
            account.dropped += inbox.queued()
            inbox.buffer.clear()
        error = RuntimeError(f"the event loop of subscriber {subscriber.name} has ended")
        account.last_error = error_text(error)
        if queued or not self._callers:
            cure = _ENDED if self._callers else _RAISED
            logger.error("%s: %d events are counted as failed or dropped. %s", error, queued, cure)
            subscriber.report(error, None, 0.0)
        inbox.spill.discard()
        subscriber.closed.set()
        subscriber.release_waiters()


def _task_that_runs(loop: asyncio.AbstractEventLoop | None) -> asyncio.Task[Any] | None:
    """Return the task whose code runs on a loop now; None if the loop waits. Safe from any thread."""
    return None if loop is None else asyncio.current_task(loop)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs on the calling thread, or None."""
    with suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


def _current_task() -> asyncio.Task[Any] | None:
    """Return the task whose code runs on the calling thread, or None."""
    with suppress(RuntimeError):  # no loop runs
        return asyncio.current_task()
    return None


def _yield_interpreter() -> None:
    """Let another thread run that waits for the interpreter's lock.

    The event loop releases the lock only while it polls its sockets, which is shorter than a thread needs to
    wake up. Each release also restarts the 5 ms after which a waiting thread may demand the lock. In a trial
    a thread got it only after seconds.
    """
    sleep(0.0)
