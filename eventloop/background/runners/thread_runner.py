"""Deliver to a plain function on a thread of its own.

Only one thread can run Python code at a time. So `Pace` lets the threads of subscribers work one after the
other, so that a training step is delayed by at most one of them.
"""

from __future__ import annotations

import threading
from math import inf
from time import perf_counter, sleep

from eventloop.background.queues.runner import Delivery, Runner
from eventloop.background.queues.subscriber import Subscriber
from eventloop.background.threads import BackgroundThread
from eventloop.events import Event
from eventloop.events.deferred import Timed
from eventloop.processes.cpu_time import of_thread
from eventloop.util.waiting import Latch

HOLD_SECONDS = 0.0006
"""The seconds of a turn, for which a background thread works before it lets the training thread run.

They are a small part of even a short training step. With shorter turns most time would be lost refilling the
processor's caches after each switch of threads.
"""
EVERY_SECONDS = 0.004
"""The seconds from the begin of one turn to the begin of the next turn of any thread."""
LONGEST_SECONDS = 0.04
"""The longest wait for a turn in seconds. With very many subscribers some turns therefore begin together."""
RUN = 256
"""The number of events that a thread removes from its queue at once if deliveries are short."""
_IDLE_SECONDS = 1.0
"""The interval in seconds at which a thread checks its queue if nothing wakes it.

The thread that normally wakes it, the keeper, may be waiting for a slow disk.
"""


class Pace:
    """Reserve turns, `EVERY_SECONDS` apart, for the threads of subscribers.

    Several threads are woken at once. Each runs Python code for a fraction of a training step. If all did so
    in the same step, this step would take twice as long. So a thread waits for its turn before it works.

    Only the begins of turns are spread: no thread waits for the end of another thread's turn, so a writer
    that waits for its disk delays no other writer. In a flush, and if its queue becomes full, a thread works
    without waiting for a turn.
    """

    def __init__(self) -> None:
        self._free = 0.0
        self._lock = threading.Lock()

    def next_turn(self) -> float:
        """Reserve a turn and return the seconds until it begins."""
        now = perf_counter()
        with self._lock:
            turn = min(max(now, self._free), now + LONGEST_SECONDS)
            self._free = turn + EVERY_SECONDS
        return turn - now


class ThreadRunner(Runner):
    """Deliver on a daemon thread, which does not keep the interpreter from exiting if it hangs.

    Args:
        subscriber: the subscriber with the events.
        pace: the turns of all threads of the bus.
    """

    runs_on = "thread"
    thread: BackgroundThread

    def __init__(self, subscriber: Subscriber, pace: Pace) -> None:
        super().__init__(subscriber.fn, subscriber.options.most, subscriber.account, subscriber.inbox)
        self.subscriber = subscriber
        self._pace = pace
        self._ready = Latch()
        self._fast = False  # whether the last deliveries were so short that several are counted together
        self.thread = BackgroundThread(target=self._run, name=f"eventloop {subscriber.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def wake(self) -> None:
        """Wake the thread because its queue has events."""
        self._ready.set()

    def cpu_time(self) -> float:
        """Return the CPU time of the thread in seconds."""
        native_id = self.thread.native_id
        return of_thread(native_id) if native_id is not None else 0.0

    def _run(self) -> None:
        """Deliver all events until the subscriber ends, and end it in any case."""
        try:
            self._deliver_all()
        except BaseException as error:  # of any kind, because a close waits for this thread
            self.subscriber.break_off(error)
        else:
            self.subscriber.finish()

    def _deliver_all(self) -> None:
        """Deliver events in turns of `HOLD_SECONDS`, and wait for more events, until the subscriber ends."""
        subscriber, inbox, account = self.subscriber, self.inbox, self.account
        while not account.ended_by:
            self._ready.clear()
            worked_seconds = inf  # so that the first delivery waits for a turn
            while (inbox.incoming or inbox.buffer or inbox.spill.count) and not account.ended_by:
                if subscriber.lingers():
                    break
                if worked_seconds > HOLD_SECONDS:
                    self._wait_for_turn()
                    worked_seconds = 0.0
                seconds = self._deliver_next()
                if seconds is None:
                    break
                worked_seconds += seconds
            subscriber.flush_if_due()
            if account.ended_by or (subscriber.no_more and not subscriber.queued):
                return
            self._ready.wait(_IDLE_SECONDS)

    def _deliver_next(self) -> float | None:
        """Deliver the next events, and return the seconds; None if the queue is empty."""
        subscriber = self.subscriber
        if self._fast and self._may_run:
            if not (events := self.inbox.pop(RUN)):
                return None
            seconds = self._deliver_run(events)
            self._fast = seconds < HOLD_SECONDS
            subscriber.flush_if_due()
            return seconds
        if (item := subscriber.next_delivery()) is None:
            return None
        seconds = self._deliver(item)
        self._fast = seconds < HOLD_SECONDS / RUN  # so that `RUN` such deliveries fit into a turn
        return seconds

    @property
    def _may_run(self) -> bool:
        """Return whether single events may be delivered in a row and counted together.

        Each delivery must be counted by itself if the queue drops events or blocks emits, if events are
        delivered in batches, while spans are recorded, and with a budget.
        """
        subscriber = self.subscriber
        if self.most or not self.inbox.spills:
            return False
        return subscriber.recorder is None and subscriber.busy.budget is None

    def _wait_for_turn(self) -> None:
        """Wait for this thread's next turn, so that other threads can run Python code until then.

        If a flush or close waits, or the queue becomes full, let other threads run only once.
        """
        if self.subscriber.is_draining():
            sleep(0.0)
            return
        turn = perf_counter() + self._pace.next_turn()
        while (remaining_seconds := turn - perf_counter()) > 0:
            self._ready.clear()
            if self.subscriber.is_draining():  # checked after the clear, so that no wake-up is missed
                return
            self._ready.wait(remaining_seconds)

    def _deliver(self, item: Delivery | list[Timed]) -> float:
        """Call the handler, count the delivery, and return its seconds."""
        try:
            self.fn(item)
        except BaseException as error:  # also a SystemExit, which must not end the thread
            return self.subscriber.end_delivery(error)
        return self.subscriber.end_delivery(None)

    def _deliver_run(self, events: list[Event]) -> float:
        """Deliver single events in a row, and count all of them together; return the seconds.

        A delivery costs 0.3 us in this way, and 3 us if it is counted by itself (`benchmarks.throughput`).
        """
        fn, account, progress, clock = self.fn, self.account, self.account.progress, perf_counter
        failure: BaseException | None = None
        began = now = self.began = clock()
        longest = 0.0
        try:
            for event in events:
                fn(event)
                progress[0] += 1
                previous, now = now, clock()
                if now - previous > longest:  # noqa: PLR1730  # max() takes 60 ns more
                    longest = now - previous
                self.began = now
                if account.ended_by:
                    break
        except BaseException as error:  # also a SystemExit, which must not end the thread
            failure = error
        return self._count_run(events, progress, began, longest, failure)

    def _count_run(
        self,
        events: list[Event],
        progress: list[int],
        began: float,
        longest: float,
        failure: BaseException | None,
    ) -> float:
        """Count the deliveries that `_deliver_run` has made; return their seconds.

        Args:
            events: the events of the series, some of which may not be delivered.
            progress: the list with the number of delivered events.
            began: the begin of the series, by `perf_counter`.
            longest: the seconds of the longest delivery.
            failure: the error that has ended the series, or None.
        """
        subscriber, account = self.subscriber, self.account
        seconds, delivered = perf_counter() - began, progress[0]
        with account.lock:
            self.began = 0.0
            if account.progress is not progress:  # the series was counted when it stalled
                return seconds
            account.progress = [0]
            account.end_calls(delivered, seconds, delivered)
            if failure is not None:
                account.end_calls(1, 0.0, 1, failure)
            undelivered = events[delivered + (failure is not None) :]
            if account.ended_by:
                account.dropped += len(undelivered)
                account.in_flight = 0
        if delivered:
            subscriber.busy.add_run(delivered, seconds, longest)
        if failure is not None:
            subscriber.fail(failure, events[delivered], seconds)
        self.inbox.put_back(undelivered)
        return seconds
