"""Deliver to a subscriber in its own worker process; the training never waits for it.

    bus.subscribe(my_module.draw, "image_logged", offload="process")

A thread removes events from the queue, encodes them and sends them. At most `IN_FLIGHT` events are
unacknowledged; the others stay in the queue, where the overflow policy applies. An event is acknowledged when
its delivery has returned, and is then not sent again. If the worker dies, unacknowledged events are sent to
the next worker, if `restarts` decides for one. So delivery is *at least once*: an event may come twice.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf
from time import monotonic, perf_counter
from typing import Any

import msgspec

from eventloop.background.queues.options import SubscriberOptions
from eventloop.background.queues.runner import Delivery, Flush, Runner
from eventloop.background.queues.subscriber import Report, Subscriber
from eventloop.background.threads import BackgroundThread
from eventloop.background.workers.importable import pack
from eventloop.background.workers.in_flight import Flights
from eventloop.background.workers.log_records import log_again
from eventloop.background.workers.protocol import Progress, unpack_error
from eventloop.background.workers.restarts import Restarts
from eventloop.background.workers.sending import Sender
from eventloop.background.workers.wake_pipe import WakePipe
from eventloop.events import Event
from eventloop.events.encoding_errors import bad_events
from eventloop.processes.channel import Frame, Kind, frame
from eventloop.processes.child import END_SECONDS, WorkerProcess
from eventloop.processes.cpu_time import computes, of_process
from eventloop.util.text import error_text
from eventloop.util.waiting import Latch

logger = logging.getLogger("eventloop")
BACKLOG_BYTES = 1 << 20
"""The most bytes that wait for room in the pipe; with more, as of a large image, no event is encoded."""
START_SECONDS = 120.0
"""The seconds after which a worker that is still importing its handler is killed if it used no CPU time."""
_ACK_SLACK = 0.1  # the longest time in seconds from the end of a delivery to its acknowledgement
_CHECK_SECONDS = 1.0  # the longest time for which the thread blocks at once


def process_subscriber(
    name: str, fn: Callable[..., Any], options: SubscriberOptions, report: Report
) -> Subscriber:
    """Return a subscriber with a worker process, which receives batches and calls `on_flush` and `on_close`.

    Raises:
        TypeError: a worker could not import the handler.
    """
    target = pack(fn, options.on_flush, options.on_close)
    queue_options = msgspec.structs.replace(options, batch=False, on_flush=None, on_close=None)
    subscriber = Subscriber(name, fn, queue_options, report)
    calls = {"on_flush": options.on_flush, "on_close": options.on_close}
    called = frozenset(filter(calls.get, calls))
    subscriber.runner = ProcessRunner(subscriber, target, options.most, called)
    return subscriber


class ProcessRunner(Runner):
    """Deliver in a worker process. A thread starts it, sends events to it and supervises it.

    Args:
        subscriber: the subscriber with the events.
        target: the encoded handler and callbacks.
        most: the largest batch; 0 if events are sent one by one.
        calls: the names of the callbacks, "on_flush" and "on_close", that the subscriber has.
    """

    runs_on = "process"
    thread: threading.Thread

    def __init__(self, subscriber: Subscriber, target: bytes, most: int, calls: frozenset[str]) -> None:
        super().__init__(subscriber.fn, 0, subscriber.account, subscriber.inbox)
        self.subscriber = subscriber
        self.worker: WorkerProcess | None = None
        self.ready = Latch()  # set when the worker has imported its handler; no event is sent before
        self.flights = Flights(subscriber.account, most)
        self.restarts = Restarts(subscriber, self.flights)
        self._sender, self._calls = Sender(subscriber, self.flights, target), calls
        self._killed = self._recording = self._close_sent = self._finished = False
        # as the current worker says: ", waiting for X" or "", and the number of acknowledged events
        self._awaited, self._acknowledged = "", 0
        self._since = 0.0  # the begin of the worker's current delivery or callback, or of its start
        self._start_cpu = 0.0  # the worker's CPU time when its start was last checked
        self._unflushed: deque[Flush] = deque()  # flushes that the worker was asked for and has not made
        self._pipe = WakePipe()
        self.thread = BackgroundThread(target=self._run, name=f"eventloop {subscriber.name}", daemon=True)

    # --- any thread ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, which starts the worker."""
        self.thread.start()

    def wake(self) -> None:
        """Wake the thread because its queue has events; safe from any thread."""
        self._pipe.wake()

    @property
    def starting(self) -> bool:
        """Return whether the worker is still importing its handler."""
        return not self.ready.is_set()

    @property
    def calling(self) -> bool:
        """Return whether the worker has a delivery, or a request for a callback, that is not completed."""
        return bool(self.flights.sent or self._unflushed or self._close_sent)

    def call(self) -> tuple[float, float, str]:
        """Return the begin, the seconds and the callback's name of the current call; zeros without one."""
        since = self._since
        if self.starting or not self.calling:
            return 0.0, 0.0, ""
        callback = "on_flush" if self._unflushed else "on_close" if self._close_sent else ""
        return since, monotonic() - since, "" if self.flights.sent else callback

    def awaited(self) -> str:
        """Return ", waiting for X" if the worker, or else the handler here, says so; "" otherwise."""
        return self._awaited or super().awaited()

    def overdue(self, now: float, limit: float) -> bool:
        """Return False, because the runner's own thread finds a worker that hangs."""
        return False

    def cpu_time(self) -> float:
        """Return the CPU time of the worker process in seconds."""
        worker = self.worker
        return 0.0 if worker is None else of_process(worker.pid)

    def in_flight(self) -> list[Event]:
        """Return the events that the worker has not acknowledged, or its destination has not accepted."""
        return self.flights.all_events()

    def current(self) -> Delivery | None:
        """Return the oldest delivery that the worker has not completed; None without one."""
        with suppress(IndexError):  # another thread has acknowledged it meanwhile
            if self.flights.sent:
                return self.flights.as_delivered(self.flights.waiting[0])
        return None

    def unconfirmed(self) -> int:
        """Return the number of delivered events that the worker's destination has not accepted yet."""
        return self.account.unconfirmed

    def kill(self) -> None:
        """Kill the worker at the deadline of a close; unacknowledged events still count as queued."""
        self._killed = True
        worker = self.worker
        if worker is not None and not self.account.closed.is_set():
            worker.kill()
        self.wake()

    def release(self) -> None:
        """End the worker and drop its events, because the runner's thread has ended."""
        try:
            if self.worker is not None:
                self.worker.end()
        except Exception:
            logger.exception("the worker process of %s could not be ended", self.subscriber.name)
        self._drop_flights()

    # --- the runner's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._finished or self._killed or self.account.ended_by == "stalled"):
                self._turn()
        except BaseException as error:  # of any kind, because emits and a close wait for this thread
            self._end(error)
        finally:
            self._end_worker()

    def _turn(self) -> None:
        """Start a worker, or exchange messages with it, and replace it if it is dead or hangs."""
        if self.worker is None:
            self._start_worker()
            return
        self._send(self.worker)
        remaining_seconds = self._seconds_left()
        timeout = None if remaining_seconds == inf else max(0.0, min(_CHECK_SECONDS, remaining_seconds))
        for message in self.worker.exchange(timeout, self._pipe.fd):
            self._receive(message)
        if self._finished or self._killed:  # after `kill` the worker's events still count as queued
            return
        if self.worker.gone:
            self._replace(self.worker.end(END_SECONDS))
        elif self._seconds_left() <= 0 and not self._still_starts():
            self._end_hung_worker(self.worker)

    def _start_worker(self) -> None:
        """Start a worker after the pause that follows a death, unless nothing is left to deliver."""
        self.flights.sent = self._acknowledged = 0
        ended_by, subscriber = self.account.ended_by, self.subscriber
        if not ended_by:
            self.flights.resend_unconfirmed()
        if (ended_by or (subscriber.no_more and self.restarts.deaths)) and not subscriber.queued:
            self._finished = True  # without a new worker, which would have no event and nothing to close
            return
        if (pause := self.restarts.start_at - monotonic()) > 0:
            self._pipe.sleep(pause)
            return
        self.ready.clear()
        self._recording = False
        self._since, self._start_cpu = monotonic(), 0.0
        try:
            self.worker = self._sender.start_worker()
        except OSError as error:
            self._replace(f"it could not be started: {error}")

    def _end_worker(self) -> None:
        if self.worker is not None:
            self.worker.end(END_SECONDS if self._finished else 0.0)
        self._pipe.close()
        self.subscriber.finish()

    # --- sending -------------------------------------------------------------------------------------------

    def _send(self, worker: WorkerProcess) -> None:
        """Send the events for which the pipe has room, a due flush, and the close after the last event."""
        subscriber, flights, ready = self.subscriber, self.flights, not self.starting
        ending = subscriber.no_more or bool(self.account.ended_by)  # read first: no event is added after it
        if ready and self._recording != (subscriber.recorder is not None):
            self._recording = not self._recording
            worker.push(frame(Kind.RECORD, int(self._recording)))
        # after a death `held` lets deliveries go one at a time; `lingers` waits for events of a larger batch
        while ready and worker.backlog < BACKLOG_BYTES and not flights.held:
            if subscriber.lingers() or not self._sender.has_next():
                break
            frames = self._sender.next_frames(self.restarts.deaths)
            if flights.next:
                self._push(*frames)
                flights.sent += 1
            else:
                worker.push(*frames)
                flights.remove_next()
        subscriber.flush_if_due()
        idle = ready and not flights.waiting and not self._close_sent
        if ending and idle and (self.account.ended_by or not subscriber.queued):
            self._push(frame(Kind.CLOSE))
            self._close_sent = True

    def forward_flush(self, flush: Flush) -> bool:
        """Ask the worker to flush, or complete the flush here if the worker has no callback; return True."""
        if self.worker is None or not (flush.calls or self._unflushed):  # flushes are completed in order
            flush.made.set()
        else:
            self._push(frame(Kind.FLUSH))
            self._unflushed.append(flush)
        return True

    def _push(self, *messages: bytes) -> None:
        assert self.worker is not None
        if not (self.calling or self.starting):
            self._since = monotonic()
        self.worker.push(*messages)

    # --- receiving -----------------------------------------------------------------------------------------

    def _receive(self, message: Frame) -> None:
        match message.kind:
            case Kind.READY:
                self._since = monotonic()
                self.ready.set()
            case Kind.REFUSED:
                cause, _ = unpack_error(message.body)
                refusal = RuntimeError(f"its worker process could not begin: {error_text(cause)}")
                refusal.__cause__ = cause
                self._end(refusal)
            case Kind.DONE:
                self._count_delivered(message)
            case Kind.FAILED:
                self._count_failed(*unpack_error(message.body))
            case Kind.FLUSHED:
                self._report_callback(message.body, "on_flush")
                self._since = monotonic()
                self._unflushed.popleft().made.set()
            case Kind.CLOSED:
                self._report_callback(message.body, "on_close")
                self._finished = True
            case Kind.LOG:
                log_again(message.body)

    def _count_delivered(self, message: Frame) -> None:
        """Count the deliveries that succeeded since the last acknowledgement; its number is a total."""
        count = message.number - self._acknowledged
        self._acknowledged = message.number
        progress = msgspec.msgpack.decode(message.body, type=Progress)
        self._awaited = progress.awaited
        if (recorder := self.subscriber.recorder) is not None:
            for delivery, (began, seconds) in self.flights.with_spans(count, progress.spans):
                self.subscriber.record(recorder, delivery, began, seconds)
        if progress.untaken or self.flights.unconfirmed:
            self.flights.retain_unconfirmed(count, progress.untaken)
        self._acknowledge(count)
        self.account.end_calls(len(progress.durations), sum(progress.durations), count)
        for seconds in progress.durations:
            self.subscriber.busy.add(seconds)
        self.subscriber.room.ring()

    def _count_failed(self, error: BaseException, seconds: float) -> None:
        """Count the oldest delivery as failed; all before it were acknowledged by an earlier message."""
        subscriber, delivery = self.subscriber, self.flights.waiting[0]
        item, count = self.flights.as_delivered(delivery), len(delivery)
        if subscriber.recorder is not None:
            subscriber.record(subscriber.recorder, item, perf_counter() - seconds, seconds)
        self._acknowledged += count
        self._acknowledge(count)
        self.account.end_calls(1, seconds, count, error)
        only_unencodable = bool(bad_events(error, count))
        if subscriber.options.on_error == "disable" and not only_unencodable:  # the worker has stopped too
            self._drop_flights()  # before `fail`, so that a thread that waits for the end finds them counted
        subscriber.fail(error, item, seconds)
        subscriber.room.ring()

    def _acknowledge(self, count: int) -> None:
        self.flights.acknowledge(count)
        self._since = monotonic()
        self.restarts.in_a_row = 0

    def _report_callback(self, body: bytes, what: str) -> None:
        if body:
            error, _ = unpack_error(body)
            self.subscriber.fail_callback(error, what)

    # --- hangs and deaths ----------------------------------------------------------------------------------

    def _seconds_left(self) -> float:
        """Return the seconds until the worker's current delivery, callback or start exceeds its limit."""
        ready = not self.starting
        if ready and not self.calling:
            return inf
        limit = self.subscriber.options.stall_timeout + _ACK_SLACK if ready else START_SECONDS
        return self._since + limit - monotonic()

    def _still_starts(self) -> bool:
        """Return whether a worker that is not ready in time has used CPU time; give it as long again then."""
        if not self.starting:
            return False
        before, self._start_cpu = self._start_cpu, self.cpu_time()
        if not computes(before, self._start_cpu, START_SECONDS):
            return False
        self._since = monotonic()
        return True

    def _end_hung_worker(self, worker: WorkerProcess) -> None:
        worker.end()
        limit, seconds = self.subscriber.options.stall_timeout, monotonic() - self._since
        if self.starting:
            self._replace(f"it got nowhere in its start for {START_SECONDS:g} s")
        elif not self.flights.sent:
            callback = "on_close" if self._close_sent else "on_flush"
            self._replace(f"it spent more than {limit:g} s on {callback}")
        elif self.restarts.stall(seconds):
            self.subscriber.room.ring()
            self._replace("killed for stalling")
        else:
            self._finished = True

    def _replace(self, how: str) -> None:
        """End the subscriber, or let another worker start, after a worker has ended in the way `how`."""
        self.worker = None
        if self._unflushed:
            self._report_death(how, "on_flush")
            while self._unflushed:
                self._unflushed.popleft().made.set()
        if self._close_sent and not self.flights.waiting:
            self._report_death(how, "on_close")
            self._finished = True
        elif self.account.ended_by:  # a subscriber that has ended needs no other worker
            self._drop_flights()
            self._finished = True
        else:
            self._finished = not self.restarts.die(how, ready=self.ready.is_set())
            self.subscriber.room.ring()

    def _report_death(self, how: str, what: str) -> None:
        """Report that the worker died in the callback `what`, if the subscriber has this callback."""
        if what in self._calls:
            self.subscriber.fail_callback(ChildProcessError(f"its worker process died: {how}"), what)

    def _end(self, error: BaseException) -> None:
        """End the subscriber because of an error of its runner, whatever its `on_error`."""
        try:
            self.restarts.end(error, None)
        finally:
            self._finished = True

    def _drop_flights(self) -> None:
        self.flights.drop()
        self.subscriber.room.ring()
