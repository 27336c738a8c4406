"""Encode the events of one subscriber for its worker process."""

from __future__ import annotations

import os
import pickle

import msgspec

from eventloop.background.queues.subscriber import Subscriber
from eventloop.background.workers.importable import owner_of
from eventloop.background.workers.in_flight import Flights
from eventloop.background.workers.log_records import level_for_workers
from eventloop.background.workers.protocol import EventEncoder, Setup, pack_times
from eventloop.events.deferred import unstamped
from eventloop.events.encoding_errors import Unencodable
from eventloop.processes.channel import Kind, frame
from eventloop.processes.child import WorkerProcess
from eventloop.processes.launch import Home

IN_FLIGHT = 64
"""The largest number of events sent to a worker that it has not acknowledged yet."""


class Sender:
    """Send deliveries to the current worker of a subscriber.

    Args:
        subscriber: the subscriber with the events.
        flights: the deliveries that are not acknowledged.
        target: the encoded handler and callbacks.
    """

    def __init__(self, subscriber: Subscriber, flights: Flights, target: bytes) -> None:
        self._subscriber, self._flights, self._target = subscriber, flights, target
        self._owner = owner_of(subscriber.fn)
        self._home = Home.here()  # later workers start in the same directory, even if the program changes it
        # with "latest" an event stays in the queue, where a newer one replaces it, until the worker is free
        self._limit = 1 if subscriber.options.overflow == "latest" else IN_FLIGHT
        self._encoder = EventEncoder()
        self._begun = False

    def start_worker(self) -> WorkerProcess:
        """Start a worker process, and send it the handler to import.

        Raises:
            OSError: the process cannot be started.
        """
        self._begun, self._encoder = False, EventEncoder()
        worker = WorkerProcess(self._home)
        path = [os.fsencode(entry) for entry in self._home.path]
        disable = self._subscriber.options.on_error == "disable"
        setup = Setup(path, self._target, disable, level_for_workers())
        worker.push(frame(Kind.SETUP, 0, msgspec.msgpack.encode(setup)))
        return worker

    def has_next(self) -> bool:
        """Get the next delivery for `next_frames`; return False without one, or if the worker has enough.

        Deliveries that a dead worker had come first. After them one is removed from the queue.
        """
        flights = self._flights
        if flights.unsent:
            return True
        room = self._limit - flights.events  # `flights.most` is the largest batch, 0 for single events
        delivery = self._subscriber.inbox.pop(min(room, flights.most or 1)) if room > 0 else []
        if delivery:
            flights.waiting.append(delivery)
        return bool(delivery)

    def next_frames(self, deaths: int) -> list[bytes]:
        """Return the messages of the next delivery.

        Events that cannot be encoded count as failed, and are removed from the delivery.

        Args:
            deaths: the number of earlier workers that have died, which the handler is given.
        """
        subscriber, delivery = self._subscriber, self._flights.next
        frames: list[bytes] = []
        if not self._begun:
            self._begun = True
            facts = self._owner.worker_facts() if self._owner is not None else None
            frames.append(frame(Kind.BEGIN, deaths, pickle.dumps(facts)))
        begin_of_delivery = len(frames)
        items, delivery[:] = list(delivery), []
        for item in items:
            try:
                self._encoder.encode(unstamped(item), frames)
                delivery.append(item)
            except Unencodable as error:
                with subscriber.account.lock:
                    subscriber.account.failed += 1
                    subscriber.account.in_flight -= 1
                subscriber.fail(error, unstamped(item))
        if self._flights.most and delivery:
            times = pack_times(delivery) if subscriber.options.timed else b""
            frames.insert(begin_of_delivery, frame(Kind.BATCH, len(delivery), times))
        return frames
