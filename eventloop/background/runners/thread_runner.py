"""Deliver to a plain function on a thread of its own.

Only one thread can run Python code at a time, so `Pace` spreads the work of the threads over time: a training
step is delayed by at most one of them.
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
"""The seconds that a background thread works before it lets the training run: a part of a short step.

With shorter turns most time would be lost refilling the processor's caches after each switch of threads.
"""
EVERY_SECONDS = 0.004
"""The seconds from the begin of one turn to the begin of the next turn of any thread."""


LONGEST_SECONDS = 0.04
"""The longest wait for a turn in seconds; with very many subscribers some turns therefore begin together."""
RUN = 256
"""The number of events that a thread takes out of its queue together if deliveries are short."""
_IDLE_SECONDS = 1.0
"""The interval in seconds at which a thread looks at its queue without being woken.

The keeper, which normally wakes it, may be waiting for a slow disk.
"""


class Pace:
    """Reserve turns, `EVERY_SECONDS` apart, for the event loop and for the threads of subscribers.

    The keeper wakes several threads at once. Each holds the interpreter for a fraction of a training step; if
    all ran in the same step, that step would take twice as long. So a thread waits for its turn before it
    begins to work.

    Only the begins of turns are spread: no thread waits for the end of another thread's turn, so a writer
    that waits for its disk delays no other writer. A thread that has to catch up, as in a flush, begins
    without a turn.
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
    """Deliver on a daemon thread, which can be abandoned if it hangs.

    anyio's worker threads are not daemons: a hung one would keep the interpreter from exiting.

    Args:
        subscriber: has the events.
        pace: spreads the work of all threads over time.
    """

    runs_on = "thread"
    thread: BackgroundThread

    def __init__(self, subscriber: Subscriber, pace: Pace) -> None:
        super().__init__(subscriber.fn, subscriber.options.most, subscriber.account, subscriber.inbox)
        self.subscriber = subscriber
        self._pace = pace
        self._ready = Latch()
        self._fast = False  # whether deliveries are short enough to be counted together
        self.thread = BackgroundThread(target=self._run, name=f"eventloop {subscriber.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def wake(self) -> None:
        """Make the thread look at its queue."""
        self._ready.set()

    def cpu_time(self) -> float:
        """Return the CPU time of the thread in seconds."""
        native_id = self.thread.native_id
        return of_thread(native_id) if native_id is not None else 0.0

    def _run(self) -> None:
        try:
            self._deliver_all()
        except BaseException as error:  # must be reported, because a close waits for this thread
            self.subscriber.break_off(error)
        else:
            self.subscriber.finish()

    def _deliver_all(self) -> None:
        subscriber, inbox, account = self.subscriber, self.inbox, self.account
        while not account.ended_by:
            self._ready.clear()
            held = inf  # the first delivery waits for its turn too
            while (inbox.incoming or inbox.buffer or inbox.spill.count) and not account.ended_by:
                if subscriber.lingers():
                    break
                if held > HOLD_SECONDS:
                    self._wait_for_turn()
                    held = 0.0
                took = self._deliver_next()
                if took is None:
                    break
                held += took
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
            took = self._deliver_run(events)
            self._fast = took < HOLD_SECONDS
            subscriber.flush_if_due()
            return took
        if (item := subscriber.next_delivery()) is None:
            return None
        took = self._deliver(item)
        self._fast = took < HOLD_SECONDS / RUN
        return took

    @property
    def _may_run(self) -> bool:
        """Return whether single events may be delivered in a row and counted together."""
        subscriber = self.subscriber
        single = self.inbox.spills and not self.most
        return single and subscriber.recorder is None and subscriber.busy.budget is None

    def _wait_for_turn(self) -> None:
        """Wait for this thread's next turn, so that other threads can run Python code until then.

        If a flush or close waits, or events come faster than they are delivered, only yield to other threads
        once.
        """
        if self.subscriber.is_draining():
            sleep(0.0)
            return
        until = perf_counter() + self._pace.next_turn()
        while (left := until - perf_counter()) > 0:
            self._ready.clear()
            if self.subscriber.is_draining():  # checked after the clear, so that no wake-up is missed
                return
            self._ready.wait(left)

    def _deliver(self, item: Delivery | list[Timed]) -> float:
        try:
            self.fn(item)
        except BaseException as error:  # a SystemExit in a subscriber is its own affair
            return self.subscriber.end_delivery(error)
        return self.subscriber.end_delivery(None)

    def _deliver_run(self, events: list[Event]) -> float:
        """Deliver single events in a row, and count all of them together; return the seconds.

        A delivery takes 0.3 us in this way, and 3 us when counted by itself (`benchmarks.throughput`).
        """
        fn, account, progress, clock = self.fn, self.account, self.account.progress, perf_counter
        failure: BaseException | None = None
        began = now = self.began = clock()
        longest = 0.0
        try:
            for event in events:
                fn(event)
                progress[0] += 1
                then, now = now, clock()
                if now - then > longest:  # noqa: PLR1730  # max() takes 60 ns more
                    longest = now - then
                self.began = now
                if account.ended_by:
                    break
        except BaseException as error:  # a SystemExit in a subscriber is its own affair
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
        subscriber, account = self.subscriber, self.account
        now, done = perf_counter(), progress[0]
        with account.lock:
            self.began = 0.0
            if account.progress is not progress:  # counted already when it stalled
                return now - began
            account.progress = [0]
            account.end_calls(done, now - began, done)
            if failure is not None:
                account.end_calls(1, 0.0, 1, failure)
            rest = events[done + (failure is not None) :]
            if account.ended_by:
                account.dropped += len(rest)
                account.in_flight = 0
        if done:
            subscriber.busy.add_run(done, now - began, longest)
        if failure is not None:
            subscriber.fail(failure, events[done], now - began)
        self.inbox.put_back(rest)
        return now - began
