"""Deliver to a subscriber in its own worker process; the training never waits for it.

    bus.subscribe(my_module.draw, "image_logged", offload="process")

A thread takes events out of the queue, encodes and sends them. At most `IN_FLIGHT` events are unacknowledged;
the others stay in the queue, where the overflow policy applies. An event is acknowledged when its delivery
has returned, and is then never sent again. If the worker dies, unacknowledged events are sent to the next
worker. Delivery is *at least once*: a handler may see an event a second time after the death of the first
worker.

After a death, events are sent again one delivery at a time, to find the delivery that kills the worker. When
`DEATHS_IN_A_ROW` workers have died without an acknowledgement, the first delivery has failed, and `on_error`
decides whether the subscriber continues. After `DEATHS` deaths the subscriber is disabled: its unacknowledged
events count as failed, its queued ones as dropped.
"""

from __future__ import annotations

import os
import pickle
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import monotonic, perf_counter
from typing import Any

import msgspec

from eventloop.background.queues.failures import Report
from eventloop.background.queues.flush import Flush
from eventloop.background.queues.options import LaneOptions
from eventloop.background.threads import BackgroundThread
from eventloop.background.workers.importable import owner_of, pack
from eventloop.background.workers.log_records import level_for_workers, log_again
from eventloop.background.workers.protocol import EventEncoder, Progress, Setup, pack_times, unpack_error
from eventloop.background.workers.restarts import SupervisedLane
from eventloop.events import Event
from eventloop.events.deferred import unstamped
from eventloop.events.encoding_errors import Unencodable, bad_events
from eventloop.processes.channel import Frame, Kind, frame
from eventloop.processes.child import END_SECONDS, WorkerProcess
from eventloop.processes.launch import Home
from eventloop.util.text import error_text

IN_FLIGHT = 64
"""The largest number of events sent to a worker that it has not acknowledged yet."""
BACKLOG_BYTES = 1 << 20
"""The number of bytes waiting for room in the pipe from which no further event is encoded.

So large images are sent one by one.
"""


class ProcessLane(SupervisedLane):
    """The queue of a subscriber in a worker process, with the thread that feeds it.

    Raises:
        TypeError: a worker could not import the handler.
    """

    def __init__(self, name: str, fn: Callable[..., Any], options: LaneOptions, report: Report) -> None:
        self._target = pack(fn, options.on_flush, options.on_close)
        self._owner = owner_of(fn)
        self._home = Home.here()  # every worker starts here, even if the program has changed directory
        self._limit = 1 if options.overflow == "latest" else IN_FLIGHT
        own = replace(options, batch=False, on_flush=None, on_close=None)
        calls = {"on_flush": options.on_flush, "on_close": options.on_close}
        super().__init__(name, fn, own, report, most=options.most, calls=frozenset(filter(calls.get, calls)))
        self._begun = self._abandoned = self._recording = False
        self._encoder = EventEncoder()
        self._acknowledged = 0  # events acknowledged by the current worker
        self._wake_lock = threading.Lock()
        self._bell, self._ringer = os.pipe()
        os.set_blocking(self._ringer, False)
        self._thread = BackgroundThread(target=self._run, name=f"eventloop {name}", daemon=True)

    # --- any thread ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, which starts the worker."""
        self._thread.start()

    def wake(self) -> None:
        """Make the thread look at its queue; safe from any thread."""
        with self._wake_lock, suppress(BlockingIOError):  # a full pipe wakes the thread, too
            if self._ringer >= 0:
                os.write(self._ringer, b"\0")

    def wait_ready(self, timeout: float) -> bool:
        """Wait until the worker has imported its handler; return False on a timeout.

        Events stay in the queue until then.
        """
        return self._worker_ready.wait(timeout)

    def abandon(self) -> None:
        """Kill the worker at the deadline of a close; unacknowledged events stay in the account as queued."""
        super().abandon()
        self._abandoned = True
        worker = self.worker
        if worker is not None and not self.closed.is_set():
            worker.kill()
        self.wake()

    def check_stall(self, now: float) -> None:
        """Do nothing: the subscriber's own thread checks for stalls, as it never waits for the worker."""

    # --- the lane's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._finished or self._abandoned or self.ended_by == "stalled"):
                self._turn()
        except BaseException as error:  # must be reported, because emits and a close wait for this thread
            self._end_by(error, None)
        finally:
            self._end_worker()

    def _end_worker(self) -> None:
        if self.worker is not None:
            self.worker.end(END_SECONDS if self._finished else 0.0)
        with self._wake_lock:
            os.close(self._bell)
            os.close(self._ringer)
            self._ringer = -1
        self._finish()

    def _turn(self) -> None:
        if self.worker is None:
            self._start_worker()
            return
        self._feed(self.worker)
        for message in self.worker.exchange(self._patience(), self._bell):
            self._hear(message)
        if self._finished or self._abandoned:  # events of a worker killed by `abandon` stay queued
            return
        if self.worker.gone:
            self._lost(self.worker.end(END_SECONDS))
        elif self._overdue() <= 0 and not self._still_starts():
            self._stalled()

    def _start_worker(self) -> None:
        self._flights.sent = self._acknowledged = 0
        if not self.ended_by:
            self._send_untaken_again()
        if (self.ended_by or (self._no_more and self.deaths)) and not self.queued:
            self._finished = True  # no new worker, which would have nothing to close
            return
        if (left := self._start_at - monotonic()) > 0:
            self._sleep(left)
            return
        self._worker_ready.clear()
        self._begun = self._recording = False
        self._encoder = EventEncoder()
        self._since, self._start_cpu = monotonic(), 0.0
        try:
            self.worker = WorkerProcess(self._home)
        except OSError as error:
            self._lost(f"it could not be started: {error}")
            return
        path = [os.fsencode(entry) for entry in self._home.path]
        setup = Setup(path, self._target, self.options.on_error == "disable", level_for_workers())
        self.worker.push(frame(Kind.SETUP, 0, msgspec.msgpack.encode(setup)))

    def _sleep(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        if poll.poll(seconds * 1e3):
            os.read(self._bell, 4096)

    # --- sending -------------------------------------------------------------------------------------------

    def _feed(self, worker: WorkerProcess) -> None:
        ending = self._no_more or bool(self.ended_by)  # read before the queue is checked for events
        if self._ready and self._recording != (self.recorder is not None):
            self._recording = not self._recording
            worker.push(frame(Kind.RECORD, int(self._recording)))
        while self._ready and worker.backlog < BACKLOG_BYTES and not self._flights.held:
            if self._gathers() or not self._next_flight():
                break
            self._send(worker)
        self._flush_if_due()
        idle = self._ready and not self._flights.waiting and not self._close_sent
        if ending and idle and (self.ended_by or not self.queued):
            self._ask(frame(Kind.CLOSE))
            self._close_sent = True

    def _next_flight(self) -> bool:
        """Return whether there is a delivery to send; take one out of the queue if needed."""
        if self._flights.unsent:
            return True
        room = self._limit - self._flights.events
        flight = self._take(min(room, self._together or 1)) if room > 0 else []
        if flight:
            self._flights.waiting.append(flight)
        return bool(flight)

    def _send(self, worker: WorkerProcess) -> None:
        flight = self._flights.next
        frames: list[bytes] = []
        if not self._begun:
            self._begun = True
            facts = self._owner.worker_facts() if self._owner is not None else None
            frames.append(frame(Kind.BEGIN, self.deaths, pickle.dumps(facts)))
        head = len(frames)
        items, flight[:] = list(flight), []
        for item in items:
            try:
                self._encoder.encode(unstamped(item), frames)
                flight.append(item)
            except Unencodable as error:
                with self._lock:
                    self.failed += 1
                    self._in_flight -= 1
                self._failure(error, unstamped(item), 0.0)
        if self._together and flight:
            times = pack_times(flight) if self.options.timed else b""
            frames.insert(head, frame(Kind.BATCH, len(flight), times))
        if flight:
            self._ask(*frames)
            self._flights.sent += 1
        else:
            worker.push(*frames)
            self._flights.forget_next()

    def _flush(self, flush: Flush) -> None:
        if self.worker is None or not (flush.calls or self._unflushed):  # all its events are acknowledged
            flush.made.set()
        else:
            self._ask(frame(Kind.FLUSH))
            self._unflushed.append(flush)

    def _ask(self, *messages: bytes) -> None:
        assert self.worker is not None
        if not self._busy and self._ready:
            self._since = monotonic()
        self.worker.push(*messages)

    # --- hearing -------------------------------------------------------------------------------------------

    def _under_way_events(self) -> list[Event]:
        flights = [list(self._untaken_events), *self._flights.waiting]
        return [unstamped(item) for flight in flights for item in flight]

    def _hear(self, message: Frame) -> None:
        match message.kind:
            case Kind.READY:
                self._since = monotonic()
                self._worker_ready.set()
            case Kind.REFUSED:
                error, _ = unpack_error(message.body)
                refusal = f"its worker process could not begin: {error_text(error)}"
                self._end_by(_because(RuntimeError(refusal), error), None)
            case Kind.DONE:
                self._done(message)
            case Kind.FAILED:
                self._failed(*unpack_error(message.body))
            case Kind.FLUSHED:
                self._tell_of(message.body, "on_flush")
                self._flushed_by_worker()
            case Kind.CLOSED:
                self._tell_of(message.body, "on_close")
                self._finished = True
            case Kind.LOG:
                log_again(message.body)

    def _done(self, message: Frame) -> None:
        count = message.number - self._acknowledged
        self._acknowledged = message.number
        progress = msgspec.msgpack.decode(message.body, type=Progress)
        self._awaited = progress.awaited
        if self.recorder is not None:
            self._record_spans(self.recorder, count, progress.spans)
        if progress.untaken or self._untaken_events:
            self._keep_untaken(count, progress.untaken)
        self._land(count)
        with self._lock:
            self.delivered += count
            self._in_flight -= count
            self.calls += len(progress.took)
            self.seconds += sum(progress.took)
        for seconds in progress.took:
            self.busy.add(seconds)
        self._moved()

    def _failed(self, error: BaseException, seconds: float) -> None:
        flight = self._flights.waiting[0]
        if self.recorder is not None:
            self._record(self.recorder, self._item_of(flight), perf_counter() - seconds, seconds)
        self._acknowledged += len(flight)
        self._land(len(flight))
        with self._lock:
            self._charge(error, len(flight))
            self._in_flight -= len(flight)
            self.calls += 1
            self.seconds += seconds
        if self.options.on_error == "disable" and not bad_events(
            error, len(flight)
        ):  # the worker has stopped, too
            self._drop_flights()  # first, so that a thread that waits for the end finds them counted
        self._failure(error, self._item_of(flight), seconds)
        self._moved()

    def _flushed_by_worker(self) -> None:
        self._since = monotonic()
        self._unflushed.popleft().made.set()

    def _tell_of(self, body: bytes, what: str) -> None:
        if body:
            error, _ = unpack_error(body)
            self.complain(error, what)


def _because(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error
