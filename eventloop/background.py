"""The background side of a bus: one thread running anyio, which routes events to the subscribers' lanes.

The emitting thread appends an event to `inbox` and is done: no lock, no wake-up, no I/O. The loop looks at the
inbox every `POLL_SECONDS` (or at once when somebody flushes), and routes what it finds. `asyncio` wakes it at
26 us a call, which is why nobody does so per event.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic, perf_counter, sleep
from typing import Any

import anyio
import anyio.lowlevel

from eventloop.deferred import Deferred, Posted, Stamped
from eventloop.events import Event, EventsDropped, HandlerFailed
from eventloop.filters import Passes
from eventloop.health import Health
from eventloop.lane import Lane, Route
from eventloop.lane_options import LaneOptions, Offload
from eventloop.meter import DELIVERY_PERIOD, WARM_UP
from eventloop.pace import HOLD_SECONDS, Pace
from eventloop.process_lane import ProcessLane
from eventloop.runners import TaskLane, ThreadLane
from eventloop.spans import INBOX, SpanRecorder

logger = logging.getLogger("eventloop")

POLL_SECONDS = 0.2
DEVICE_POLL_SECONDS = 0.002
"""How often the loop asks whether a value has left the device."""
CHUNK = 512
"""Events from which on an emitting thread looks whether the loop keeps up."""
HURRY = 8 * CHUNK
"""Events from which on the loop takes no breath: it does not keep up."""
RUN = 64
"""Events that are routed together, at most."""
INBOX_LIMIT = 65_536
"""Events the inbox holds while the loop cannot run. What comes beyond is dropped, and counted."""
DROP_REPORT_SECONDS = 1.0


Item = Event | Stamped | Posted | Callable[[], None]


class Background:
    """The loop's thread, the inbox, and the lanes it feeds."""

    def __init__(self) -> None:
        self.inbox: deque[Item] = deque()
        self.lanes: list[Lane] = []
        self.health = Health(lambda event, but: self._call_soon(lambda: self.route(event, but)))
        self.latest = self.health.latest  # of the events that are born here
        self.closed = False
        self.complete = True  # what `close` returned
        self.never_waits = False
        """Nobody has time any more: a blocking subscriber that is full takes what comes all the same."""
        self.recorder: SpanRecorder | None = None
        self._pace = Pace()
        self._made = 0  # how many posted events' makers were asked
        self._looked: Callable[[], None] | None = None
        self._routes: dict[type[Event], tuple[Route, ...]] = {}
        self._waiting: deque[Item] = deque()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._wake: anyio.Event | None = None
        self._coroutines: set[TaskLane] = set()  # coroutine subscribers' lanes that have not ended
        self._hurried = False  # woken by `relieve` since it last looked
        self._awaited: set[threading.Event] = set()  # set once what was emitted before is routed
        self._stopping = False
        self._ending = False
        self._started = threading.Event()

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
        self._routes = routes

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
        if not (self.never_waits or self.on_background_thread()):
            for route in (route for kind in posted.types for route in self._routes.get(kind, ())):
                if route.lane.options.overflow == "block":
                    route.lane.wait_for_room(self.wake, self._check_stalls)
        if (
            not self.closed
        ):  # also where nobody listens: what is posted is read here, not on the posting thread
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
            self.wake()
        self._check_stalls()  # the loop cannot report a coroutine that holds the loop itself
        while len(self.inbox) > INBOX_LIMIT:
            self._drop(self.inbox.popleft())

    def _drop(self, item: Item) -> None:
        if isinstance(item, Stamped):
            item = item.event
        if isinstance(item, Event):
            for route in self._routes.get(type(item), ()):
                route.lane.lose(item, route.passes)
        elif isinstance(item, Posted):  # how many events it would have become nobody knows: one of a type
            for event_type in item.types:
                for route in self._routes.get(event_type, ()):
                    route.lane.lose()
        else:
            item()

    def wake(self) -> None:
        """Make the loop look at its inbox now."""
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
        reached = threading.Event()
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
        for lane in lanes:
            lane.flush_soon()
        for lane in lanes:
            complete = self._wait(lane.wait_flushed, deadline) and complete
        return complete

    def close(self, timeout: float) -> bool:
        """Deliver what was handed over, close every lane, stop the thread; False when the deadline came first."""
        if self.closed:
            return self.complete
        self.closed = True
        if self._thread is None:
            return True
        deadline = monotonic() + timeout
        complete = self.route_now(timeout)
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
        for lane in self.lanes:
            lane.abandon()
        self._stopping = True
        self.wake()
        self._thread.join(max(0.1, deadline - monotonic()))
        self._route_rest()  # what was emitted meanwhile: the lanes count it as dropped
        self.complete = complete
        if not complete:
            left = ", ".join(f"{lane.name} ({lane.queued})" for lane in self.lanes if lane.queued)
            logger.warning("closed after %g s; events left undelivered: %s", timeout, left or "none")
        self._let_go()
        return complete

    def _closing_order(self) -> tuple[list[Lane], list[Lane]]:
        """Who hears of failures and drops comes last: the others may fail over what they still have."""
        listening = {
            route.lane for kind in (HandlerFailed, EventsDropped) for route in self._routes.get(kind, ())
        }
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
        with suppress(IndexError):  # the loop may come to itself and take them
            while True:
                item = (self._waiting or self.inbox).popleft()
                if isinstance(item, Stamped):
                    item = item.event
                if isinstance(item, Event):
                    self.route(item)
                else:
                    self._drop(item)

    def become_inert(self) -> None:
        """In a forked child, where the threads are missing: forget all that was to be delivered."""
        vars(self).update(vars(Background()), closed=True)

    def end_soon(self) -> None:
        """Nobody holds the bus any more: deliver what is left, then end, without anyone waiting."""
        if self._thread is None:
            self.closed = True
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
                    if self._ending and not self.inbox and not self._waiting:
                        self._end()
                except Exception:
                    logger.exception("the background loop failed and goes on; please report this")
                with anyio.move_on_after(DEVICE_POLL_SECONDS if self._waiting else POLL_SECONDS):
                    await self._wake.wait()
            self._tasks.cancel_scope.cancel()

    async def _run_lane(self, lane: TaskLane) -> None:
        try:
            await lane.run()
        finally:
            self._coroutines.discard(lane)

    async def _breathe(self) -> None:
        """Leave the interpreter to the training thread for a while, unless somebody waits. Where no coroutine needs the
        loop it sleeps itself: in the middle of a training the timers of asyncio take 300 us for that, more than the
        events between two breaths."""
        hurry = bool(self._awaited) or self._ending or len(self.inbox) > HURRY
        turn = 0.0 if hurry else self._pace.next_turn()
        if hurry or self._coroutines:
            await anyio.sleep(turn)
        else:
            sleep(turn)  # noqa: ASYNC251 - on purpose, see above

    async def _route_inbox(self) -> None:
        if self.inbox:
            await self._breathe()
        held, run = perf_counter(), list[Event]()
        for _ in range(len(self.inbox)):
            if not self.inbox:
                break  # the emitting thread has dropped some
            if len(self._waiting) >= INBOX_LIMIT:
                break  # a device that never answers: the inbox fills, and is kept bounded
            self._waiting.append(self.inbox.popleft())
            self._take_waiting(run)
            tired = perf_counter() - held > HOLD_SECONDS
            if tired or len(run) >= RUN:
                self._route_run(run)
            if tired:
                await self._breathe()
                held = perf_counter()
        self._take_waiting(run)
        self._route_run(run)

    def _take_waiting(self, run: list[Event]) -> None:
        """Add to a run what is there, in the order of the emits: events, and a mark of `route_now`, wait for the values
        put before."""
        while self._waiting:
            item = self._waiting.popleft()
            if isinstance(item, Event):
                run.append(item)
            elif isinstance(item, Stamped):
                self._route_run(run)
                self.route(item.event, emitted=item.emitted)
            elif not isinstance(item, Posted):
                self._route_run(run)
                item()
            elif not self._make(item, run):
                self._waiting.appendleft(item)
                return

    def _make(self, posted: Posted, run: list[Event]) -> bool:
        """Add the events of a deferred that is ready to a run; one that fails is dropped, and holds nobody up."""
        try:
            if not posted.deferred.ready():
                return False
            events = list(posted.deferred.events())
        except Exception:
            logger.exception("events could not be made: %r", posted.deferred)
            self._drop(posted)
            return True
        self._made += 1
        if self._made > WARM_UP and self._made % DELIVERY_PERIOD:
            run += events
            return True
        self._route_run(run)
        for event in events:
            self.route(event, emitted=posted.emitted)
        return True

    def _route_run(self, run: list[Event]) -> None:
        """Route events, and leave the run empty: as `route` does for each, at a fifth of the time where a lane has no
        filter, for it is locked once."""
        pending: dict[Lane, list[Event]] = {}
        for event in run:
            if event.background_born:
                self.latest[type(event)] = event
            for route in self._routes.get(type(event), ()):
                if route.passes is None:
                    if (events := pending.get(route.lane)) is None:
                        events = pending[route.lane] = []
                    events.append(event)
                else:  # asked in the order of the events, and after those before
                    if (events := pending.pop(route.lane, None)) is not None:
                        route.lane.put_many(events)
                    route.lane.put(event, route.passes)
        run.clear()
        for lane, events in pending.items():
            lane.put_many(events)

    def route(self, event: Event, but: Lane | None = None, emitted: float = 0.0) -> None:
        """Put an event into the queue of everyone who subscribed to it; on the loop's thread. `emitted` is when that
        was, for one whose wait is to be measured."""
        if event.background_born:
            self.latest[type(event)] = event
        for route in self._routes.get(type(event), ()):
            if route.lane is not but:
                route.lane.put(event, route.passes, emitted)

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
            lane.check_stall(now)

    def _let_go(self) -> None:
        self._routes = {}
        self.lanes = []  # a subscriber may well hold the bus, which this outlives

    def _end(self) -> None:
        for lane in self.lanes:
            lane.close_soon()
        if all(lane.done for lane in self.lanes):
            self.closed = self._stopping = True
            self._let_go()
