"""Run the background side of a bus: one thread routes events to subscribers' queues.

The emitting thread appends an event to `inbox` and returns: no lock, no wake-up, no I/O. The thread's asyncio
loop looks at the inbox every `POLL_SECONDS`, or at once during a flush, and routes what it finds
(`eventloop.background.router`), in turns with the subscribers' threads
(`eventloop.background.gil_scheduler`). Waking an asyncio loop costs 26 us, too much for each event; a
subscriber that emitted during a delivery wakes it after that delivery (`eventloop.background.queues.wakeup`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic, perf_counter
from typing import Any, NoReturn

import anyio
import anyio.lowlevel

from eventloop.background.draining import POLL_SECONDS, Draining
from eventloop.background.gil_scheduler import HOLD_SECONDS, Pace
from eventloop.background.queues.options import LaneOptions, Offload
from eventloop.background.queues.subscriber import Lane, Route
from eventloop.background.runners import CallersLane, TaskLane, ThreadLane
from eventloop.background.workers.subscriber import ProcessLane
from eventloop.costs.spans import INBOX, SpanRecorder
from eventloop.events import Event
from eventloop.events.deferred import Deferred, Posted, Stamped
from eventloop.events.filters import Passes
from eventloop.util.dry_run import plan_file
from eventloop.util.waiting import Latch

logger = logging.getLogger("eventloop")

RING_SECONDS = 0.01
"""The least time between two looks at the inbox if events emitted by subscribers cause the second."""
DEVICE_POLL_SECONDS = 0.002
"""How often the loop checks whether a value has left the device."""
CHUNK = 512
"""Length of the inbox from which on an emitting thread checks whether the loop keeps up."""
HURRY = 8 * CHUNK
"""Length of the inbox from which on the loop routes without pauses, because it does not keep up."""
STRIDE = 8
"""Events that the loop takes out of its inbox between two looks at the clock."""
INBOX_LIMIT = 1_048_576
"""The largest number of events in the inbox, about 100 MB.

It is reached while the loop cannot run, or cannot keep up with a thread that only emits. Then the oldest
events are dropped, and counted.
"""
DROP_REPORT_SECONDS = 1.0


class Background(Draining):
    """The loop's thread, the inbox, and the queues it feeds."""

    def __init__(self) -> None:
        super().__init__()
        self.latest = self.health.latest  # the last event of each type that the background emits
        self.never_waits = plan_file() is not None
        """True once emits no longer wait for a blocking subscriber, whose full queue exceeds its limit."""
        self.inert = False
        """True in a forked child, which has none of the threads."""
        self.recorder: SpanRecorder | None = None
        self._pace = Pace()
        self._looked: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._wake: anyio.Event | None = None
        self._hurried = False  # woken by `relieve` since it last looked
        self._rung = False  # asked for a look by a subscriber's thread since
        self._ending = False
        self._started = Latch()
        self._refusal: BaseException | None = None  # why it could not be started
        self._stirred = Latch()  # ends a breath

    # --- subscribing (any thread) --------------------------------------------------------------------------

    def add_lane(
        self,
        name: str,
        fn: Callable[..., Any],
        options: LaneOptions,
        offload: Offload | None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Lane:
        """Start the queue and the runner of a subscriber; the first subscriber starts the loop.

        Args:
            loop: an event loop of the caller, which runs a coroutine function in place of this one.

        Raises:
            TypeError: offload="process", and a worker process could not import the subscriber.
            RuntimeError: the background side is closed, or no thread can be started, as at the exit of Python
                3.12.
        """
        closed = RuntimeError(
            f"cannot subscribe {name}: the bus is closed and delivers no more; bus.reopen() opens it again"
        )
        if self.closed:
            raise closed
        self.start()
        lane = self._begin_lane(name, fn, options, offload, loop)
        if self.closed:  # another thread has just done so, perhaps without this lane
            self.remove_lane(lane)
            raise closed
        return lane

    def _begin_lane(
        self,
        name: str,
        fn: Callable[..., Any],
        options: LaneOptions,
        offload: Offload | None,
        loop: asyncio.AbstractEventLoop | None,
    ) -> Lane:
        report = self.health.report
        if offload is not None or loop is not None:
            elsewhere = (
                CallersLane(name, fn, options, report, loop)
                if loop is not None
                else ProcessLane(name, fn, options, report)
                if offload == "process"
                else ThreadLane(name, fn, options, report, self._pace)
            )
            elsewhere.recorder, elsewhere.doorbell = self.recorder, self._doorbell
            if plan_file() is None:
                elsewhere.start()
            self.lanes.append(elsewhere)
            return elsewhere
        lane = TaskLane(name, fn, options, report, self._call_soon)
        lane.recorder, lane.doorbell = self.recorder, self._doorbell
        self.lanes.append(lane)
        self._coroutines.add(lane)
        self._call_soon(
            lambda: self._tasks and self._tasks.start_soon(self._run_lane, lane, name=f"eventloop {name}")
        )
        return lane

    def remove_lane(self, lane: Lane) -> None:
        """End the queue of a subscriber whose subscription was cancelled."""
        lane.give_up("cancelled")
        lane.release()
        self.health.tell_drops([lane])  # nobody looks at it any more
        with suppress(ValueError):  # closed, it has let go of its lanes
            self.lanes.remove(lane)

    def set_routes(self, routes: dict[type[Event], tuple[Route, ...]], *, in_turn: bool = False) -> None:
        """Replace the whole routing table at once, so that the loop never sees a part of it.

        Args:
            in_turn: whether events on their way are still routed by the old table, because the caller could
                not wait for them: the loop is blocked, or the caller is a subscriber. Ignored within a
                filter: a subscription made there gets the event that the filter is called with, and all after
                it.
        """
        in_turn = in_turn or self._router.coming  # behind a table that waits, its successor does too
        publish = self._router.publish(routes)
        if in_turn and not self._router.asks_here:
            self.in_turn(publish)
        else:
            publish()

    def in_turn(self, call: Callable[[], None]) -> None:
        """Call `call` once everything emitted before is routed."""
        self.inbox.append(call)

    @property
    def asks_here(self) -> bool:
        """Return whether this thread is within a filter."""
        return self._router.asks_here

    def on_the_way(self) -> Counter[Lane]:
        """Return how many unrouted events each subscriber without a filter will get."""
        return self._router.on_the_way(self.inbox)

    # --- recording (any thread) ----------------------------------------------------------------------------

    def record(self, recorder: SpanRecorder | None, looked: Callable[[], None] | None = None) -> None:
        """Record deliveries and queue depths with `recorder`, or stop with None.

        Args:
            looked: called each time the loop has looked at its inbox.
        """
        self.recorder, self._looked = recorder, looked
        for lane in self.lanes:
            lane.recorder = recorder

    def after_routing(self, call: Callable[[], None]) -> bool:
        """Have the loop call `call` once everything emitted so far is routed; return False without a loop."""
        if self.closed or self._stopping or self._thread is None:
            return False
        self.inbox.append(call)
        return True

    # --- handing over (the emitting thread) ----------------------------------------------------------------

    def gate(self, lane: Lane, passes: Passes | None) -> Callable[[Event], None]:
        """Return the function that feeds a subscriber with overflow="block": it waits for room in the queue.

        It does not wait on a thread of the background.
        """

        def feed(event: Event) -> None:
            if self.on_background_thread():
                lane.put(event, passes)
                self._emission = object()
                lane.wake()
            elif self.never_waits:
                lane.put(event, passes)
            else:
                lane.put_or_wait(event, passes, self.wake, self._check_stalls)

        return feed

    def hand_over_noted(self, event: Event) -> None:
        """Hand over an event during a flush, which also waits for what subscribers emit."""
        self.inbox.append(event)
        if self.on_background_thread():
            self._emission = object()
            self.wake()

    def hand_over_stamped(self, event: Event) -> None:
        """Hand over an event with the time, to measure how long it waits."""
        self.inbox.append(Stamped(event, perf_counter()))

    def post(self, deferred: Deferred, types: Iterable[type[Event]] = ()) -> None:
        """Hand over events that are made later, when their values are ready.

        Waits for room in the queue of each blocking subscriber to one of `types`.
        """
        posted = Posted(deferred, tuple(types), perf_counter())
        blocking = [lane for lane in self._router.lanes_of(posted.types) if lane.options.overflow == "block"]
        if blocking and not (self.never_waits or self.on_background_thread()):
            for lane in blocking:
                lane.wait_for_room(self.wake, self._check_stalls)
        if not self.closed:  # also where nobody listens: it is read here, not on the posting thread
            self.start()
        self.inbox.append(posted)

    def relieve(self) -> None:
        """Keep the inbox bounded; an emitting thread calls it now and then.

        Wakes a loop that lags behind. If the loop cannot run at all, drops the oldest events and counts them
        as dropped by their subscribers.
        """
        if self.recorder is not None:
            self.recorder.depth(INBOX, len(self.inbox))
        if len(self.inbox) < CHUNK:
            return
        if not self._hurried:  # each emit may come here, and a wake writes to a socket
            self._hurried = True
            self._call_soon(self._look)
        self._check_stalls()  # the loop cannot report a coroutine that holds the loop itself
        if len(self.inbox) <= INBOX_LIMIT:
            return
        ask = not self._router.stuck  # a filter that holds the loop would hold the emitting thread too
        while len(self.inbox) > INBOX_LIMIT:
            self._router.drop(self.inbox.popleft(), ask=ask)

    def wake(self) -> None:
        """Make the loop look at its inbox now; safe from any thread."""
        self._stirred.set()
        self._call_soon(self._look)

    # --- at the edges of a process --------------------------------------------------------------------------

    def become_inert(self) -> None:
        """In a forked child, where the threads are missing, forget all events and subscribers."""
        vars(self).update(vars(Background()), closed=True, finished=True, inert=True)

    def end_soon(self) -> None:
        """Deliver the rest, then end, without making a thread wait.

        Called when the last reference to the bus is gone.
        """
        if self._thread is None:
            self.closed = self.finished = True
        else:
            self._ending = True
            self.wake()

    # --- the loop's thread ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the loop's thread and wait until it accepts calls; safe from any thread.

        Does nothing if it runs, if the bus is closed, or in a dry run.

        Raises:
            RuntimeError: no thread, or no loop, can be started.
        """
        if self._loop is not None or plan_file() is not None:
            return
        with self._starting:
            if self._thread is None and not self.finished:
                self._thread = threading.Thread(target=self._run, name="eventloop background", daemon=True)
                try:  # known by then: a Ctrl-C may come when it runs already
                    self._thread.start()
                except RuntimeError:
                    self._thread = None  # so that a close has nothing to wait for
                    raise
            begun, started = self._thread, self._started
        if begun is not None:
            started.wait()
            if self._loop is None:
                self._could_not_start(begun)

    def _run(self) -> None:
        try:
            anyio.run(self._main)
        except BaseException as error:
            if self._loop is not None:
                raise
            self._refusal = error  # there are no more descriptors, say
        finally:
            self._started.set()  # somebody waits

    def _could_not_start(self, thread: threading.Thread) -> NoReturn:
        with self._starting:
            if self._thread is thread:  # another one may be, later
                self._thread, self._started = None, Latch()
        raise RuntimeError(f"the background loop could not be started: {self._refusal!r}") from self._refusal

    def _call_soon(self, fn: Callable[[], object]) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        with suppress(RuntimeError):  # it closed in between: there is nobody left to wake
            loop.call_soon_threadsafe(fn)

    def _look(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def _ring(self) -> None:
        """Make the loop look soon at events that a subscriber emitted; called on the subscriber's thread."""
        if not self._rung:
            self._rung = True
            self._call_soon(self._look_in_turn)

    def _look_in_turn(self) -> None:
        left = self._looked_at + RING_SECONDS - monotonic()
        if self._loop is None or left <= 0 or self.closed or self._awaited:
            self._look()
        else:
            self._loop.call_later(left, self._look)

    async def _main(self) -> None:
        async with anyio.create_task_group() as self._tasks:
            self._loop = asyncio.get_running_loop()
            self._started.set()
            while not self._stopping:
                self._wake, self._hurried, self._rung = anyio.Event(), False, False
                self._looked_at = monotonic()
                self._doorbell.looks += 1
                try:
                    await self._route_inbox()
                    self._look_after_lanes()
                    if self._ending and not self.inbox and not self._router.waiting:
                        self._end()
                except (asyncio.CancelledError, GeneratorExit):
                    raise
                except BaseException:
                    logger.exception("the background loop failed and goes on; please report this")
                with anyio.move_on_after(DEVICE_POLL_SECONDS if self._router.waiting else POLL_SECONDS):
                    await self._wake.wait()
            self._tasks.cancel_scope.cancel()

    async def _run_lane(self, lane: TaskLane) -> None:
        try:
            await lane.run()
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            lane.break_off(error)  # let through, it would end the loop, and with it everybody's deliveries
        finally:
            self._coroutines.discard(lane)
            lane.closed.set()  # also where the fork interrupted a delivery

    async def _breathe(self) -> None:
        """Leave the interpreter to the training thread until the loop's next turn, or until a wake-up.

        Returns at once during a flush. If no coroutine needs the loop, its thread itself waits: asyncio's
        timers take 300 us for that during a training, more than the events between two pauses.
        """
        stirred = self._stirred.is_set()
        self._stirred.clear()
        if stirred or self._awaited or self._ending or len(self.inbox) > HURRY:  # asked after the clear
            await anyio.lowlevel.checkpoint()
        elif self._coroutines:
            await anyio.sleep(self._pace.next_turn())
        else:
            self._stirred.wait(self._pace.next_turn())

    async def _route_inbox(self) -> None:
        router = self._router
        if self.inbox and not router.waiting:
            await self._breathe()
        held = perf_counter()
        for _ in range(0, len(self.inbox), STRIDE):
            if len(router.waiting) >= INBOX_LIMIT:
                break  # a device that never answers: the inbox fills, and is kept bounded
            with suppress(IndexError):  # there are no more, or the emitting thread has dropped some
                for _ in range(STRIDE):
                    router.waiting.append(self.inbox.popleft())
            router.take()
            if perf_counter() - held > HOLD_SECONDS:
                router.route_run()
                if len(self.inbox) > HURRY:  # the end of this look is far off
                    self._wake_lanes()
                await self._breathe()
                held = perf_counter()
        router.take()
        router.route_run()

    def _look_after_lanes(self) -> None:
        self._wake_lanes()
        for lane in self.lanes:
            lane.release()  # of one that stalled: who found that out was perhaps the emitting thread
        self._check_stalls()
        if self._close is None:
            self.health.tell_drops(self.lanes, DROP_REPORT_SECONDS)
        elif self._close.look(certain=True):
            self._look()  # once more
        if self._looked is not None:
            self._looked()

    def _end(self) -> None:
        for lane in self.lanes:
            lane.close_soon()
        if all(lane.done for lane in self.lanes):
            self.closed = self._stopping = True
            self._complete = not any(lane.queued for lane in self.lanes)  # a close may have been interrupted
            self._tell_losses()
            self._let_go()
            self.finished = True
