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
from time import monotonic, perf_counter
from typing import Any, Protocol

import anyio
import anyio.lowlevel

from eventloop.events import Event, EventsDropped, HandlerFailed
from eventloop.filters import Passes
from eventloop.lane import Lane, LaneOptions, TaskLane, ThreadLane

logger = logging.getLogger("eventloop")

POLL_SECONDS = 0.05
DEVICE_POLL_SECONDS = 0.002
"""How often the loop asks whether a value has left the device."""
CHUNK = 512
"""Events routed between two offers of the interpreter to the training thread: about half a millisecond."""
INBOX_LIMIT = 65_536
"""Events the inbox holds while the loop cannot run. What comes beyond is dropped, and counted."""
DROP_REPORT_SECONDS = 1.0


class Deferred(Protocol):
    """Events that can only be made later, when a value has left the device."""

    def ready(self) -> bool:
        """True when `events` will not wait."""

    def events(self) -> Iterable[Event]:
        """Make the events; called once, on the background loop."""


class Route:
    """One subscriber's interest in one type of event."""

    __slots__ = ("lane", "passes")

    def __init__(self, lane: Lane, passes: Passes | None) -> None:
        self.lane = lane
        self.passes = passes


class Background:
    """The loop's thread, the lanes, and the mail for synchronous handlers of background events."""

    def __init__(self) -> None:
        self.inbox: deque[Event | Deferred | Callable[[], None]] = deque()
        self.lanes: list[Lane] = []
        self.mail: deque[Event] = deque()
        self.errors: deque[BaseException] = deque()
        self.latest: dict[type[Event], Event] = {}
        self.closed = False
        self._routes: dict[type[Event], tuple[Route, ...]] = {}
        self._waiting: deque[Deferred | Callable[[], None]] = deque()
        self._mail_types: frozenset[type[Event]] = frozenset()
        self._reported: dict[Lane, tuple[int, float]] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._wake: anyio.Event | None = None
        self._stopping = False
        self._ending = False
        self._started = threading.Event()

    # --- subscribing (any thread) --------------------------------------------------------------------------

    def add_lane(self, name: str, fn: Callable[..., Any], options: LaneOptions, *, thread: bool) -> Lane:
        """Start a subscriber's lane; the first one starts the loop.

        Raises:
            RuntimeError: the background side is closed.
        """
        if self.closed:
            raise RuntimeError(
                f"cannot subscribe {name}: the bus is closed, its background side takes no more"
            )
        self._start()
        if thread:
            thread_lane = ThreadLane(name, fn, options, self._report)
            self.lanes.append(thread_lane)
            thread_lane.start()
            return thread_lane
        lane = TaskLane(name, fn, options, self._report, self._call_soon)
        self.lanes.append(lane)
        self._call_soon(lambda: self._tasks and self._tasks.start_soon(lane.run, name=f"eventloop {name}"))
        return lane

    def remove_lane(self, lane: Lane) -> None:
        """End a lane whose subscription was cancelled."""
        lane.give_up("cancelled")
        self.lanes.remove(lane)

    def set_routes(
        self, routes: dict[type[Event], tuple[Route, ...]], mail_types: frozenset[type[Event]]
    ) -> None:
        """Publish the whole routing table at once, so that the loop never sees half of it.
        `mail_types` are the health events that synchronous handlers wait for; see `Bus.poll`."""
        self._routes = routes
        self._mail_types = mail_types

    # --- handing over (the emitting thread) ----------------------------------------------------------------

    def gate(self, lane: Lane, passes: Passes | None) -> Callable[[Event], None]:
        """The hand-over of a subscriber with overflow="block": straight into its queue, or wait."""

        def feed(event: Event) -> None:
            if self.on_background_thread():
                lane.put(event, passes)
            else:
                lane.put_or_wait(event, passes, self.wake)

        return feed

    def post(self, deferred: Deferred, types: Iterable[type[Event]] = ()) -> None:
        """Hand over events that are still to be made; a full blocking subscriber to `types` holds the caller."""
        for event_type in types:
            for route in self._routes.get(event_type, ()):
                if route.lane.options.overflow == "block" and not self.on_background_thread():
                    route.lane.wait_for_room(self.wake)
        self.inbox.append(deferred)

    def relieve(self) -> None:
        """Keep the inbox bounded. Called now and then by the emitting thread, it wakes a loop that lags behind
        and, when the loop cannot run at all, drops the oldest events and charges their subscribers."""
        if len(self.inbox) < CHUNK:
            return
        self.wake()
        now = perf_counter()
        for lane in self.lanes:  # the loop cannot report a coroutine that holds the loop itself
            lane.check_stall(now)
        while len(self.inbox) > INBOX_LIMIT:
            item = self.inbox.popleft()
            for route in self._routes.get(type(item), ()) if isinstance(item, Event) else ():
                route.lane.lose()

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
        if self._thread is None or self.on_background_thread() or not self._thread.is_alive():
            return not self.inbox
        reached = threading.Event()
        self.inbox.append(reached.set)
        self.wake()
        return reached.wait(timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until everything emitted so far is delivered and flushed; False when that took too long."""
        deadline = monotonic() + timeout
        complete = self.route_now(timeout)
        lanes = [lane for lane in self.lanes if not lane.done]
        for lane in lanes:
            lane.flush_soon()
        for lane in lanes:
            complete = lane.wait_flushed(max(0.0, deadline - monotonic())) and complete
        return complete

    def close(self, timeout: float) -> bool:
        """Deliver what was handed over, close every lane, stop the thread; False when the deadline came first."""
        if self.closed:
            return True
        self.closed = True
        if self._thread is None:
            return True
        deadline = monotonic() + timeout
        complete = self.route_now(timeout)
        for lane in self.lanes:
            lane.close_soon()
        for lane in self.lanes:
            complete = lane.wait_closed(max(0.0, deadline - monotonic())) and complete
            lane.abandon()
        self._stopping = True
        self.wake()
        self._thread.join(max(0.1, deadline - monotonic()))
        return complete

    def end_soon(self) -> None:
        """Nobody holds the bus any more: deliver what is left, then end, without anyone waiting."""
        if self._thread is None:
            self.closed = True
        else:
            self._ending = True
            self.wake()

    # --- the loop's thread ---------------------------------------------------------------------------------

    def _start(self) -> None:
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
        try:
            loop.call_soon_threadsafe(fn)
        except RuntimeError:  # it closed in between: there is nobody left to wake
            logger.debug("the background loop is closed")

    def _look(self) -> None:
        if self._wake is not None:
            self._wake.set()

    async def _main(self) -> None:
        async with anyio.create_task_group() as self._tasks:
            self._loop = asyncio.get_running_loop()
            self._started.set()
            while not self._stopping:
                self._wake = anyio.Event()
                try:
                    await self._route_inbox()
                    self._look_after_lanes()
                    if self._ending and not self.inbox:
                        self._end()
                except Exception:
                    logger.exception("the background loop failed and goes on; please report this")
                with anyio.move_on_after(DEVICE_POLL_SECONDS if self._waiting else POLL_SECONDS):
                    await self._wake.wait()
            self._tasks.cancel_scope.cancel()

    async def _route_inbox(self) -> None:
        for turn in range(1, len(self.inbox) + 1):
            item = self.inbox.popleft()
            if isinstance(item, Event):
                self.route(item)
            else:
                self._waiting.append(item)
                self._route_waiting()
            if turn % CHUNK == 0:
                await anyio.lowlevel.checkpoint()
        self._route_waiting()

    def _route_waiting(self) -> None:
        """Route what was deferred, in order: a mark of `route_now` waits for the values put before it."""
        while self._waiting:
            item = self._waiting[0]
            if callable(item):
                item()
            elif item.ready():
                for event in item.events():
                    self.route(event)
            else:
                return
            self._waiting.popleft()

    def route(self, event: Event) -> None:
        """Put an event into the queue of everyone who subscribed to it; on the loop's thread."""
        if event.background_born:
            self.latest[type(event)] = event
        for route in self._routes.get(type(event), ()):
            route.lane.put(event, route.passes)

    def _look_after_lanes(self) -> None:
        now = perf_counter()
        for lane in self.lanes:
            if lane.buffer:
                lane.wake()
            lane.check_stall(now)
            reported, last = self._reported.get(lane, (0, 0.0))
            if lane.dropped > reported and (now - last > DROP_REPORT_SECONDS):
                self._reported[lane] = (lane.dropped, now)
                self._tell(EventsDropped(handler=lane.name, count=lane.dropped - reported))

    def _end(self) -> None:
        for lane in self.lanes:
            lane.close_soon()
        if all(lane.done for lane in self.lanes):
            self.closed = self._stopping = True

    def _report(self, lane: Lane, error: BaseException, cost: float) -> None:
        if lane.options.on_error == "raise":
            self.errors.append(error)
        watchers = self._routes.get(HandlerFailed, ())
        if all(route.lane is not lane for route in watchers):  # a failing watcher is not told of itself
            text = f"{type(error).__name__}: {error}"
            self._tell(HandlerFailed(handler=lane.name, error=text, count=max(1, lane.failed), cost=cost))

    def _tell(self, event: Event) -> None:
        """Route a health event from any background thread, and mail it to the synchronous handlers."""
        if type(event) in self._mail_types:
            self.mail.append(event)
        self._call_soon(lambda: self.route(event))
