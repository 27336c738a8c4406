"""Every overflow policy under load: the account is exact at any moment, and what it says is what happened."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any, get_args

import pytest

from eventloop.background.queues.options import Overflow
from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import AfterTrainIter, EventsDropped, HandlerFailed
from tests.conftest import DEADLINE
from tests.support.spilling import emit, in_both_kinds, subscribe, total

POLICIES = [*get_args(Overflow)]
BLOCK = 20_000
in_every_policy = pytest.mark.parametrize("overflow", POLICIES)


class Slow:
    """A subscriber to batches that holds each until it is told to go on; it checks what it is given."""

    def __init__(self) -> None:
        self.count = 0
        self.last = -1
        self.in_order = True
        self.go = threading.Semaphore(0)
        self.free = False

    def __call__(self, events: list[AfterTrainIter]) -> None:
        if not self.free:
            self.go.acquire(timeout=DEADLINE)
        self.count += len(events)
        for event in events:
            self.in_order = self.in_order and event.iter > self.last
            self.last = event.iter


def resident_mib() -> float:
    """The resident size of this process, from Linux's /proc."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def emit_all(bus: Bus, count: int, subscription: Subscription, slow: Slow) -> float:
    """Emit in blocks, looking at the account after each; returns the memory that took, in MiB."""
    before = peak = resident_mib()
    for start in range(0, count, BLOCK):
        emit(bus, BLOCK, start)
        stats = subscription.stats
        assert total(stats) == start + BLOCK
        assert stats.delivered >= slow.count - 2 * BLOCK
        slow.go.release()
        peak = max(peak, resident_mib())
    return peak - before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(("overflow", "looks"), [*((each, True) for each in POLICIES), ("spill", False)])
def test_far_more_events_than_fit(overflow: Any, looks: bool) -> None:
    """Each is delivered, dropped or queued; memory is bounded, and order is kept. So it is with a thread that does nothing
    but emit, which leaves the background no time to keep up."""
    count = 1_000_000  # 75 MiB encoded, and 170 MiB as they are
    slow, before = Slow(), resident_mib()
    slow.free = overflow == "block" or not looks  # there it would hold this thread
    with Bus(drain_timeout=DEADLINE) as bus:
        subscription = bus.subscribe(
            slow, "after_train_iter", offload="thread", queue=1024, overflow=overflow, batch=True
        )
        if looks:
            grown = emit_all(bus, count, subscription, slow)
        else:
            emit(bus, count)
            grown = resident_mib() - before
        slow.free = True
        slow.go.release()  # the delivery it may be at; it holds no other
        bus.flush(DEADLINE)
        stats = subscription.stats

    assert total(stats) == count
    assert (stats.delivered, stats.queued, stats.failed) == (slow.count, 0, 0)
    assert slow.in_order
    assert (stats.dropped == 0) == (overflow in ("spill", "block"))
    assert grown < (120 if looks else 200)
    if looks:
        assert (stats.spilled > count // 2) == (overflow == "spill")


@pytest.mark.representative(2)
@pytest.mark.parametrize("batch", [False, True, 2])
@in_both_kinds
@in_every_policy
def test_account_is_exact_at_any_moment(kind: str, overflow: Any, batch: bool | int) -> None:
    """A thread that reads the accounts all the time never sees one that does not add up; neither do the health
    events, which report every drop and every failure."""
    emitted, wrong, over = 0, [], threading.Event()
    told = {"dropped": 0, "failed": 0}

    def some_fail(events: Any) -> None:
        if any(event.iter % 10 == 0 for event in (events if batch else [events])):
            raise ValueError

    bus = Bus(drain_timeout=DEADLINE)
    bus.subscribe(lambda e: told.update(dropped=told["dropped"] + e.count), EventsDropped, offload="thread")
    bus.subscribe(lambda e: told.update(failed=told["failed"] + 1), HandlerFailed, offload="thread")
    subscription = subscribe(bus, kind, some_fail, queue=4, overflow=overflow, on_error="log", batch=batch)

    def poll() -> None:
        while not over.is_set():
            before = subscription.account()
            stats = subscription.account()
            if not (0 <= total(before) <= total(stats) <= emitted and stats.queued >= 0):
                wrong.append(stats)

    poller = threading.Thread(target=poll)
    poller.start()
    rng = random.Random(1)
    while emitted < 3000:
        emitted += (count := rng.randrange(1, 100))
        emit(bus, count, start=emitted - count)
        assert total(subscription.stats) == emitted
    over.set()
    poller.join(DEADLINE)
    bus.close(DEADLINE)
    stats = subscription.stats

    assert wrong == []
    assert (total(stats), stats.queued) == (emitted, 0)
    assert told["dropped"] == stats.dropped
    assert told["failed"] == stats.failed or batch  # a batch that fails is one report


@pytest.mark.slow
@in_every_policy
def test_subscribing_and_cancelling_from_another_thread_under_load(overflow: Any) -> None:
    """Whoever comes and goes hears an unbroken piece of the run, and those who stay miss nothing."""
    stays: list[int] = []
    pieces: list[tuple[Subscription, list[int]]] = []
    emitted, over = 0, threading.Event()

    def come_and_go(bus: Bus) -> None:
        while not over.is_set():
            received: list[int] = []
            fn = lambda event, received=received: received.append(event.iter)
            comes = bus.subscribe(fn, "after_train_iter", offload="thread", queue=200_000, overflow=overflow)
            bus.flush(DEADLINE)
            comes.cancel()
            pieces.append((comes, received))

    with Bus(drain_timeout=DEADLINE) as bus:
        bus.subscribe(lambda event: stays.append(event.iter), "after_train_iter", offload="thread")
        restless = threading.Thread(target=come_and_go, args=(bus,))
        restless.start()
        while len(pieces) < 15 and emitted < 200_000:
            emit(bus, 100, start=emitted)
            emitted += 100
            bus.stats()
        over.set()
        restless.join(DEADLINE)
        bus.flush(DEADLINE)

    assert stays == list(range(emitted))
    assert pieces
    for subscription, received in pieces:
        stats = subscription.stats
        assert stats.queued == 0
        assert stats.delivered == len(received)
        if received and overflow != "latest":
            assert received == list(range(received[0], received[0] + len(received)))
