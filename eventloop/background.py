"""The background side of a bus: one thread running anyio, which routes events to the subscribers' lanes.

The emitting thread appends an event to `inbox` and is done: no lock, no wake-up, no I/O. The loop looks at the
inbox every `POLL_SECONDS` (or at once when somebody flushes), and routes what it finds (`eventloop.router`), in turn
with the subscribers' threads (`eventloop.pace`). `asyncio` wakes it at 26 us a call, which is why nobody does so per
event.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from time import monotonic, perf_counter
from typing import Any

import anyio
import anyio.lowlevel

from eventloop.deferred import Deferred, Posted, Stamped
from eventloop.events import Event, EventsDropped, HandlerFailed
from eventloop.filters import Passes
from eventloop.health import Health
from eventloop.lane import Lane, Route
from eventloop.lane_options import LaneOptions, Offload
from eventloop.pace import HOLD_SECONDS, Pace
from eventloop.process_lane import ProcessLane
from eventloop.router import Item, Router
from eventloop.runners import TaskLane, ThreadLane
from eventloop.spans import INBOX, SpanRecorder
from eventloop.waiting import Latch

logger = logging.getLogger("eventloop")

POLL_SECONDS = 0.2
DEVICE_POLL_SECONDS = 0.002
"""How often the loop asks whether a value has left the device."""
CHUNK = 512
"""Events from which on an emitting thread looks whether the loop keeps up."""
HURRY = 8 * CHUNK
"""Events from which on the loop takes no breath: it does not keep up."""
STRIDE = 8
"""Events that the loop takes out of its inbox between two looks at the time."""
INBOX_LIMIT = 65_536
"""Events the inbox holds while the loop cannot run. What comes beyond is dropped, and counted."""
DROP_REPORT_SECONDS = 1.0
REST_SECONDS = 1.0
"""How long a close waits, at most, for filters to be asked about what it routes itself."""


class Background:
    """The loop's thread, the inbox, and the lanes it feeds."""

    def __init__(self) -> None:
        self.inbox: deque[Item] = deque()
        self.lanes: list[Lane] = []
        self.health = Health(lambda event, but: self._call_soon(lambda: self._router.route(event, but)))
        self.latest = self.health.latest  # of the events that are born here
        self._router = Router(self.latest)
        self.closed = False  # it takes no more subscribers
        self.finished = False  # it delivers no more: `close` has come to its end
        self._complete = True  # what it returned then
        self._closer = threading.RLock()  # of the thread that is closing; released by nobody else
        self.never_waits = False
        """Nobody has time any more: a blocking subscriber that is full takes what comes all the same."""
        self.recorder: SpanRecorder | None = None
        self._pace = Pace()
        self._looked: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._wake: anyio.Event | None = None
        self._coroutines: set[TaskLane] = set()  # coroutine subscribers' lanes that have not ended
        self._hurried = False  # woken by `relieve` since it last looked
        self._awaited: set[Latch] = set()  # set once what was emitted before is routed
        self._stopping = False
        self._ending = False
        self._started = Latch()
        self._stirred = Latch()  # ends a breath

    # --- subscribing (any thread) --------------------------------------------------------------------------

    def add_lane(
        self, name: str, fn: Callable[..., Any], options: LaneOptions, offload: Offload | None
    ) -> Lane:
        """Start a subscriber's lane; the first one starts the loop.

        Raises:
            TypeError: offload="process", and no process could import the subscriber.
            RuntimeError: the background side is closed.
        """
        if self.closed:
            raise RuntimeError(f"cannot subscribe {name}: the bus is closed and delivers no more")
        self.start()
        if offload is not None:
            own_thread = (
                ProcessLane(name, fn, options, self.health.report)
                if offload == "process"
                else ThreadLane(name, fn, options, self.health.report, self._pace)
            )
            own_thread.recorder = self.recorder
            self.lanes.append(own_thread)
            own_thread.start()
            return own_thread
        lane = TaskLane(name, fn, options, self.health.report, self._call_soon)
        lane.recorder = self.recorder
        self.lanes.append(lane)
        self._coroutines.add(lane)
        self._call_soon(
            lambda: self._tasks and self._tasks.start_soon(self._run_lane, lane, name=f"eventloop {name}")
        )
        return lane

    def remove_lane(self, lane: Lane) -> None:
        """End a lane whose subscription was cancelled."""
        lane.give_up("cancelled")
        lane.release()
        with suppress(ValueError):  # closed, it has let go of its lanes
            self.lanes.remove(lane)

    def set_routes(self, routes: dict[type[Event], tuple[Route, ...]]) -> None:
        """Publish the whole routing table at once, so that the loop never sees half of it."""
        self._router.routes = routes

    # --- recording (any thread) ----------------------------------------------------------------------------

    def record(self, recorder: SpanRecorder | None, looked: Callable[[], None] | None = None) -> None:
        """Leave spans of deliveries and depths of queues with a recorder, or with none; `looked` is called whenever
        the loop has looked at its inbox."""
        self.recorder, self._looked = recorder, looked
        for lane in self.lanes:
            lane.recorder = recorder

    def after_routing(self, call: Callable[[], None]) -> bool:
        """Have the loop call something once all that was emitted so far is routed; False where no loop runs."""
        if self.closed or self._stopping or self._thread is None:
            return False
        self.inbox.append(call)
        return True

    # --- handing over (the emitting thread) ----------------------------------------------------------------

    def gate(self, lane: Lane, passes: Passes | None) -> Callable[[Event], None]:
        """The hand-over of a subscriber with overflow="block": straight into its queue, or wait."""

        def feed(event: Event) -> None:
            if self.never_waits or self.on_background_thread():
                lane.put(event, passes)
            else:
                lane.put_or_wait(event, passes, self.wake, self._check_stalls)

        return feed

    def hand_over_stamped(self, event: Event) -> None:
        """Hand over an event whose wait is to be measured."""
        self.inbox.append(Stamped(event, perf_counter()))

    def post(self, deferred: Deferred, types: Iterable[type[Event]] = ()) -> None:
        """Hand over events that are still to be made; a full blocking subscriber to `types` holds the caller."""
        posted = Posted(deferred, tuple(types), perf_counter())
        blocking = [lane for lane in self._router.lanes_of(posted.types) if lane.options.overflow == "block"]
        if blocking and not (self.never_waits or self.on_background_thread()):
            for lane in blocking:
                lane.wait_for_room(self.wake, self._check_stalls)
        if not self.closed:  # also where nobody listens: it is read here, not on the posting thread
            self.start()
        self.inbox.append(posted)

    def relieve(self) -> None:
        """Keep the inbox bounded. Called now and then by the emitting thread, it wakes a loop that lags behind
        and, when the loop cannot run at all, drops the oldest events and charges their subscribers."""
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
        """Make the loop look at its inbox now."""
        self._stirred.set()
        self._call_soon(self._look)

    def on_background_thread(self) -> bool:
        """True on the loop's thread and on the lanes' threads: nobody may wait for the background there."""
        current = threading.current_thread()
        return current is self._thread or current.name.startswith("eventloop ")

    # --- draining (any thread but the background's) --------------------------------------------------------

    def route_now(self, timeout: float) -> bool:
        """Wait until everything handed over so far has reached the lanes' queues."""
        if self._thread is None or self._stopping or self.on_background_thread():
            return not self.inbox
        reached = Latch()
        self.inbox.append(reached.set)
        self._awaited.add(reached)
        try:
            self.wake()
            return self._wait(reached.wait, monotonic() + timeout)
        finally:
            self._awaited.discard(reached)

    def flush(self, timeout: float) -> bool:
        """Wait until everything emitted so far is delivered and flushed; False when that took too long."""
        deadline = monotonic() + timeout
        complete = self.route_now(timeout)
        lanes = [lane for lane in self.lanes if not lane.done]
        numbers = [lane.flush_soon() for lane in lanes]
        for lane, number in zip(lanes, numbers, strict=True):
            complete = self._wait(partial(lane.wait_flushed, number=number), deadline) and complete
        return complete

    def close(self, timeout: float) -> bool:
        """Deliver what was handed over, close every lane, stop the thread; False when the deadline came first.

        What a signal has interrupted the next call goes on with; a call during another thread's waits for that one."""
        deadline = monotonic() + timeout
        self.closed = True
        try:
            if not self._wait(lambda seconds: self._closer.acquire(timeout=seconds), deadline):
                return False
            if not self.finished:
                self._drain(deadline, timeout)
            return self._complete
        finally:
            with suppress(RuntimeError):  # a signal, or the deadline, came before it was this thread's
                self._closer.release()

    def _drain(self, deadline: float, timeout: float) -> None:
        """A signal may end this anywhere: what it has done does no harm a second time."""
        if self._thread is None:
            self.finished = True
            return
        if not self._stopping:
            self._complete = False  # until it is known
            self._complete = self._deliver_rest(deadline)
            for lane in self.lanes:
                lane.abandon()
            self._stopping = True
        self.wake()
        self._thread.join(max(0.1, deadline - monotonic()))
        self._route_rest()  # what was emitted meanwhile: the lanes count it as dropped
        if not self._complete:
            left = ", ".join(f"{lane.name} ({lane.queued})" for lane in self.lanes if lane.queued)
            logger.warning("closed after %g s; events left undelivered: %s", timeout, left or "none")
        self._let_go()
        self.finished = True

    def _deliver_rest(self, deadline: float) -> bool:
        closing = list(self.lanes)  # a signal's handler may close the bus meanwhile, which lets go of them
        complete = self.route_now(deadline - monotonic())
        self.health.tell_drops(self.lanes)
        complete = self.route_now(deadline - monotonic()) and complete
        if not complete:
            self._route_rest()  # a coroutine holds the loop
        for lanes in self._closing_order():
            for lane in lanes:
                lane.close_soon()
            for lane in lanes:
                complete = self._wait(lane.wait_closed, deadline) and complete
            complete = self.route_now(deadline - monotonic()) and complete
        return complete and not any(lane.queued for lane in closing)

    def _closing_order(self) -> tuple[list[Lane], list[Lane]]:
        """Who hears of failures and drops comes last: the others may fail over what they still have."""
        listening = {*self._router.lanes_of((HandlerFailed, EventsDropped))}
        first = [lane for lane in self.lanes if lane not in listening]
        return first, [lane for lane in self.lanes if lane in listening]

    def _wait(self, wait: Callable[[float], bool], deadline: float) -> bool:
        """Wait in slices: whoever waits for a coroutine that holds the loop has to find it stalled himself."""
        while not wait(max(0.0, min(POLL_SECONDS, deadline - monotonic()))):
            self._check_stalls()
            if monotonic() >= deadline:
                return False
        return True

    def _route_rest(self) -> None:
        """A filter is foreign code, and who closes has a deadline: where it does not return, nobody's is asked."""
        router = self._router
        if router.asks and router.filters and router.left(self.inbox):
            router.asks = self._ask_about_rest()
        router.route_rest(self.inbox)
        for lane in self.lanes:
            lane.end_asking()

    def _ask_about_rest(self) -> bool:
        thread = threading.Thread(
            target=self._router.route_rest, args=(self.inbox,), name="eventloop rest", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # an interpreter that ends starts none
            return False

        def ended(seconds: float) -> bool:
            thread.join(seconds)
            return not thread.is_alive() or self._router.stuck

        self._wait(ended, monotonic() + REST_SECONDS)
        return not thread.is_alive()

    def become_inert(self) -> None:
        """In a forked child, where the threads are missing: forget all that was to be delivered."""
        vars(self).update(vars(Background()), closed=True, finished=True)

    def end_soon(self) -> None:
        """Nobody holds the bus any more: deliver what is left, then end, without anyone waiting."""
        if self._thread is None:
            self.closed = self.finished = True
        else:
            self._ending = True
            self.wake()

    # --- the loop's thread ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the loop's thread, unless it runs."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=anyio.run, args=(self._main,), name="eventloop background", daemon=True
            )
            self._thread.start()
            self._started.wait()

    def _call_soon(self, fn: Callable[[], object]) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        with suppress(RuntimeError):  # it closed in between: there is nobody left to wake
            loop.call_soon_threadsafe(fn)

    def _look(self) -> None:
        if self._wake is not None:
            self._wake.set()

    async def _main(self) -> None:
        async with anyio.create_task_group() as self._tasks:
            self._loop = asyncio.get_running_loop()
            self._started.set()
            while not self._stopping:
                self._wake, self._hurried = anyio.Event(), False
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

    async def _breathe(self) -> None:
        """Leave the interpreter to the training thread until the loop's turn, or until somebody wakes the loop; not at all
        where somebody waits. Where no coroutine needs the loop its thread itself waits: in the middle of a training the
        timers of asyncio take 300 us for that, more than the events between two breaths."""
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
                await self._breathe()
                held = perf_counter()
        router.take()
        router.route_run()

    def _look_after_lanes(self) -> None:
        for lane in self.lanes:
            if lane.buffer:
                lane.wake()
            lane.release()  # of one that stalled: who found that out was perhaps the emitting thread
        self._check_stalls()
        self.health.tell_drops(self.lanes, DROP_REPORT_SECONDS)
        if self._looked is not None:
            self._looked()

    def _check_stalls(self) -> None:
        now = perf_counter()
        for lane in self.lanes:
            lane.check(now)

    def _let_go(self) -> None:
        self._router.routes = {}
        self.lanes = []  # a subscriber may well hold the bus, which this outlives

    def _end(self) -> None:
        for lane in self.lanes:
            lane.close_soon()
        if all(lane.done for lane in self.lanes):
            self.closed = self._stopping = True
            self._complete = not any(lane.queued for lane in self.lanes)  # a close may have been interrupted
            self._let_go()
            self.finished = True
