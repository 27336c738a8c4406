"""Manage the background subscribers of a bus: add and remove them, queue events, and supervise deliveries.

The emitting thread appends an event to the list of each of its subscribers and returns: no lock, no wake-up,
no I/O. A thread, the keeper, checks the queues every `POLL_SECONDS`, or at once during a flush. It wakes the
subscribers that have events, moves the events of busy ones into their bounded queues or temporary files,
creates deferred events once their values have left the device, and finds subscribers that hang.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

from eventloop.background.health import Health
from eventloop.background.posted import Posted
from eventloop.background.queues.inbox import Route
from eventloop.background.queues.leftover import StoreUndelivered
from eventloop.background.queues.options import Offload, SubscriberOptions
from eventloop.background.queues.subscriber import Subscriber
from eventloop.background.queues.supervision import supervise
from eventloop.background.runners.thread_runner import Pace, ThreadRunner
from eventloop.background.threads import BackgroundThread, on_background_thread
from eventloop.costs.spans import SpanRecorder
from eventloop.events import Event
from eventloop.events.deferred import Deferred
from eventloop.processes.dry_run import plan_file
from eventloop.util.waiting import Latch

if TYPE_CHECKING:
    from eventloop.background.coroutine_loop import CoroutineLoop

logger = logging.getLogger("eventloop")

POLL_SECONDS = 0.2
"""The interval in seconds at which the keeper, the thread that supervises the queues, checks them."""
DEVICE_POLL_SECONDS = 0.002
"""The interval in seconds at which the keeper thread checks whether values have left the device."""
MANY = 8192
"""The number of events in a subscriber's list above which the emitting thread wakes the keeper thread."""
DROP_REPORT_SECONDS = 1.0
"""The least time in seconds between two `events_dropped` events about one subscriber."""


class Background:
    """The background subscribers of one bus, and the keeper, the thread that supervises their queues.

    `eventloop.background.closing` flushes and closes them.
    """

    def __init__(self) -> None:
        self.subscribers: list[Subscriber] = []
        self.listening: dict[type[Event], list[Subscriber]] = {}
        self.posted: deque[Posted] = deque()
        self.health = Health(self._enqueue)
        self.latest = self.health.latest  # the last event of each type that the background creates
        self.emissions = 0
        """The number of events emitted by subscribers and health reports, counted during a flush."""
        self.closed = False  # whether a close has begun; new subscribers are refused then
        self.finished = False  # whether a close has ended, so that nothing is delivered any more
        self.complete = True  # the result of the close
        self.closer = threading.RLock()  # held by the thread that is closing
        self.reports = True  # whether health events are queued; False at the end of a close
        self.logs_losses = True  # whether a close logs lost events; False while its caller logs them
        self.flush_ends: Callable[[], bool] = lambda: False
        """Returns True to end a flush early and without a log, because a close follows."""
        self.store_undelivered: StoreUndelivered | None = None
        self.replay_command = ""  # the command that delivers the events stored by `store_undelivered`
        self.logged: dict[Subscriber, int] = {}
        """The subscribers that the last flush has logged as incomplete, with their emitted events then."""
        self.thread: threading.Thread | None = None  # the keeper
        self.coroutines: CoroutineLoop | None = None
        self.starting = threading.RLock()
        self.never_waits = plan_file() is not None
        """True once emits do not wait for room in a full queue with overflow="block" but exceed its size."""
        self.inert = False  # True in a forked child process, if the subscribers belong to the parent
        self.recorder: SpanRecorder | None = None
        self._pace = Pace()
        self._polled: Callable[[], None] | None = None
        self._stopping = self._ending = False
        self._woken = Latch()

    # --- subscribing (any thread) --------------------------------------------------------------------------

    def add(
        self,
        name: str,
        fn: Callable[..., Any],
        options: SubscriberOptions,
        offload: Offload | None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Subscriber:
        """Start the queue and the thread, task or process of a subscriber, and the keeper thread if needed.

        Args:
            name: the subscriber's name.
            fn: the handler.
            options: the options of the queue and its deliveries.
            offload: "thread" or "process" for a plain function; None for a coroutine function.
            loop: an event loop of the caller that runs a coroutine function; None means the bus's own loop.

        Raises:
            TypeError: offload="process", and a worker process could not import the subscriber.
            RuntimeError: the background is closed, or no thread can be started, as at the exit of Python
                3.12.
        """
        closed = RuntimeError(
            f"cannot subscribe {name}: the bus is closed and delivers no more; bus.reopen() opens it again"
        )
        if self.closed:
            raise closed
        self.start()
        subscriber = self.make(name, fn, options, offload, loop)
        subscriber.recorder = self.recorder
        try:
            if plan_file() is None:
                subscriber.runner.start()
            self.subscribers.append(subscriber)
            if self.closed:  # another thread has just closed the bus, perhaps without this subscriber
                raise closed
            return subscriber
        except BaseException:  # also a KeyboardInterrupt
            self.remove(subscriber)
            raise

    def make(
        self,
        name: str,
        fn: Callable[..., Any],
        options: SubscriberOptions,
        offload: Offload | None,
        loop: asyncio.AbstractEventLoop | None,
    ) -> Subscriber:
        """Create the queue and the thread, task or process of a subscriber without starting it."""
        if offload == "process":
            from eventloop.background.workers.process_runner import process_subscriber  # imports 9 modules

            return process_subscriber(name, fn, options, self.health.report)
        subscriber = Subscriber(name, fn, options, self.health.report)
        if offload == "thread":
            subscriber.runner = ThreadRunner(subscriber, self._pace)
            return subscriber
        from eventloop.background.coroutine_loop import CoroutineLoop  # imports anyio
        from eventloop.background.runners.task_runner import TaskRunner

        if loop is not None or plan_file() is not None:
            subscriber.runner = TaskRunner(subscriber, loop, callers=loop is not None)
            return subscriber
        with self.starting:
            coroutines = self.coroutines
            if coroutines is None or coroutines.ended:
                coroutines = CoroutineLoop()
            subscriber.runner = TaskRunner(subscriber, coroutines.loop)
            self.coroutines = coroutines  # last: `coroutines.loop` raises an error if it could not start
        return subscriber

    def remove(self, subscriber: Subscriber) -> None:
        """End a subscriber whose subscription was cancelled; its queued events count as dropped."""
        subscriber.give_up("cancelled")
        self.health.report_drops([subscriber])  # here, because the keeper no longer checks this subscriber
        with suppress(ValueError):  # a close has replaced the list
            self.subscribers.remove(subscriber)

    def set_routes(self, routes: dict[Subscriber, dict[type[Event], Route]]) -> None:
        """Set the event types of each subscriber, with their filters.

        They are used for health events and deferred events; an emit calls the functions of `appending`.
        """
        by_type: dict[type[Event], list[Subscriber]] = {}
        for subscriber, interests in routes.items():
            subscriber.set_routes(interests)
            for event_type in interests:
                by_type.setdefault(event_type, []).append(subscriber)
        self.listening = by_type

    def _enqueue(self, event: Event, but: Subscriber | None) -> None:
        """Queue a health event for its subscribers, except for the subscriber `but`; safe from any thread."""
        for subscriber in self.listening.get(type(event), ()) if self.reports else ():
            if subscriber is not but:
                self.emissions += 1
                subscriber.enqueue(event)

    # --- recording (any thread) ----------------------------------------------------------------------------

    def record(self, recorder: SpanRecorder | None, polled: Callable[[], None] | None = None) -> None:
        """Record deliveries and queue depths with `recorder`; None stops the recording.

        Args:
            recorder: collects the spans and depths.
            polled: called by the keeper each time after it has checked the queues.
        """
        self.recorder, self._polled = recorder, polled
        for subscriber in self.subscribers:
            subscriber.recorder = recorder

    # --- queuing (the emitting thread) ---------------------------------------------------------------------

    def wait_for_room(self, subscriber: Subscriber) -> None:
        """Wait until a subscriber's queue has room, for overflow="block"; return at once on own threads."""
        if not (self.never_waits or on_background_thread()):
            subscriber.wait_for_room()

    def post(self, deferred: Deferred, types: Iterable[type[Event]] = ()) -> None:
        """Queue a `Deferred` object, which creates events of `types` later, when their values are ready.

        Wait first until the queues of their subscribers with overflow="block" have room.
        """
        types = tuple(types)
        subscribers = dict.fromkeys(each for listed in types for each in self.listening.get(listed, ()))
        for subscriber in subscribers:
            if subscriber.options.overflow == "block":
                self.wait_for_room(subscriber)
        if not self.closed:  # also without a subscriber, because the keeper must read the values
            self.start()
        posts = [(subscriber, subscriber.inbox.post(types)) for subscriber in subscribers]
        self.posted.append(Posted(deferred, posts))

    def limit_queues(self) -> None:
        """Keep the lists of incoming events bounded; the emitting thread calls this now and then."""
        for subscriber in self.subscribers:
            if len(subscriber.inbox.incoming) > MANY:
                self.wake()
                with subscriber.account.lock:
                    subscriber.inbox.drop_excess()

    def wake(self) -> None:
        """Make the keeper thread check the queues now; safe from any thread."""
        self._woken.set()

    # --- forks, reopening, and the end of the bus's life ---------------------------------------------------

    def become_inert(self, *, reopens: bool) -> None:
        """Drop all events and subscribers in a forked child process, where the threads do not run.

        Args:
            reopens: whether another background may replace this one in the child.
        """
        for subscriber in self.subscribers:
            subscriber.abandon_in_child()
        vars(self).update(vars(Background()), closed=True, finished=True, inert=not reopens)

    def check_replaceable(self, waited: float) -> None:
        """Check that a new background may replace this one, for whose close the caller has `waited` seconds.

        Raises:
            RuntimeError: another thread is still closing this one, or it belongs to the parent process.
        """
        if self.inert:
            raise RuntimeError(
                "bus.reopen was called in a forked process, and the subscribers belong to its parent: create "
                "a new Bus or Trainer here; a bridge to another engine must not have run before the fork"
            )
        if not self.finished:
            raise RuntimeError(
                f"bus.reopen has waited drain_timeout={waited:g} s for another thread, which is still "
                "closing the bus: call it, or train, again when bus.close has returned there"
            )

    def end_soon(self) -> None:
        """Let the keeper stop all threads once the queued events are delivered; return at once.

        It is called when the last reference to the bus is gone.
        """
        if self.thread is None:
            self.closed = self.finished = True
        else:
            self._ending = True
            self.wake()

    # --- the keeper's thread -------------------------------------------------------------------------------

    def continue_from(self, former: Background) -> None:
        """Copy the latest events and the settings of `Bus.on_undelivered` from the previous background."""
        self.latest.update(former.latest)
        self.store_undelivered, self.replay_command = former.store_undelivered, former.replay_command

    def start(self) -> None:
        """Start the keeper thread, on any thread; do nothing if it runs, after a close, or in a dry run.

        Raises:
            RuntimeError: no thread can be started.
        """
        if self.thread is not None or plan_file() is not None:  # a dry run has a file for its plan
            return
        with self.starting:
            if self.thread is None and not self.finished:
                thread = BackgroundThread(target=self._run, name="eventloop background", daemon=True)
                self.thread = thread  # before `start`, which Ctrl-C may interrupt after the thread runs
                try:
                    thread.start()
                except RuntimeError:
                    self.thread = None  # so that a close does not wait for it
                    raise

    def _run(self) -> None:
        """Check the queues again and again until the end; an error is logged, and ends nothing."""
        while not self._stopping:
            self._woken.clear()
            try:
                self._poll()
            except BaseException:
                logger.exception("the keeper of the background failed and goes on; please report this")
            self._woken.wait(DEVICE_POLL_SECONDS if self.posted else POLL_SECONDS)

    def _poll(self) -> None:
        """Create deferred events that are ready, supervise each subscriber, and report dropped events."""
        if self.posted:
            self._make_posted()
        now = perf_counter()
        with_drops = [subscriber for subscriber in tuple(self.subscribers) if supervise(subscriber, now)]
        if with_drops and not self.closed:
            self.health.report_drops(with_drops, DROP_REPORT_SECONDS)
        if self._polled is not None:
            self._polled()
        if self._ending:
            self._end_if_empty()

    def last_posted(self) -> Latch | None:
        """Return a latch that is set once the events of the last posted `Deferred` object are created.

        Return None if all deferred events have been created.
        """
        try:
            return self.posted[-1].made
        except IndexError:  # the keeper has created all of them
            return None

    def _make_posted(self) -> None:
        """Create the events of posted `Deferred` objects whose values are ready, in their order."""
        while self.posted:
            posted = self.posted[0]
            try:
                if not posted.deferred.ready():
                    return
                events = list(posted.deferred.events())
                self.latest.update({type(event): event for event in events})
                posted.fill(events)
            except BaseException:  # also a SystemExit, which would end the keeper
                logger.exception("events could not be made: %r", posted.deferred)
                posted.drop()
            self.posted.popleft()
            posted.made.set()

    def _end_if_empty(self) -> None:
        """Stop all threads once the queues are empty, because the last reference to the bus is gone."""
        for subscriber in self.subscribers:
            subscriber.request_close()
        if all(subscriber.done for subscriber in self.subscribers) and not self.posted:
            self.closed = True
            # False if an interrupted close has ended a subscriber before its queue was empty
            self.complete = not any(subscriber.queued for subscriber in self.subscribers)
            self.log_losses()
            self.stop()
            self.clear()
            self.finished = True

    # --- the end (the thread that closes) ------------------------------------------------------------------

    @contextmanager
    def ending_run(self, ends: Callable[[], bool]) -> Iterator[None]:
        """Let the caller log the events lost in the block; end a flush there early once `ends()` is True.

        Within the block `close` logs no lost events. Later closes log only events that are lost afterwards.
        """
        self.logs_losses, self.flush_ends = False, ends
        try:
            yield
        finally:
            for subscriber in list(self.subscribers):
                subscriber.new_losses()  # the later closes do not log the losses up to this call
                subscriber.account.losses_logged = False  # later losses are not logged yet
            self.logs_losses, self.flush_ends = True, lambda: False

    def log_losses(self) -> None:
        """Log the numbers of events that were lost since the last log of lost events."""
        # for all subscribers, because `new_losses` returns the same losses only once
        texts = [(subscriber, subscriber.new_losses()) for subscriber in self.subscribers]
        losses = [text for subscriber, text in texts if text and not subscriber.account.losses_named]
        if losses and self.logs_losses:
            logger.warning(
                "the bus is closed, and not everything was delivered: %s. bus.stats() has the details",
                "; ".join(losses),
            )

    def stop(self) -> None:
        """Ask the keeper and the event loop of the coroutines to end; do not wait for them."""
        self._stopping = True
        self.wake()
        if self.coroutines is not None:
            self.coroutines.stop()

    def clear(self) -> None:
        """Drop the subscribers, which may hold a reference to the bus."""
        self.subscribers, self.listening, self.logged = [], {}, {}
