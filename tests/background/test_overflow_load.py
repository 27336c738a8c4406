"""Every overflow policy under load: the account is exact at any moment, and what it says is what happened."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import AfterTrainIter, Event, EventsDropped, HandlerFailed
from tests.conftest import DEADLINE, Held
from tests.support.spilling import emit, total

POLICIES = ["spill", "drop_oldest", "drop_newest", "latest", "block"]
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
@in_every_policy
def test_far_more_events_than_fit(overflow: Any) -> None:
    """Each is delivered, dropped or queued; memory is bounded, and order is kept."""
    count = 1_000_000  # 75 MiB encoded, and 170 MiB as they are
    slow = Slow()
    slow.free = overflow == "block"  # there it would hold this thread
    with Bus(drain_timeout=DEADLINE) as bus:
        subscription = bus.subscribe(
            slow, "after_train_iter", offload="thread", queue=1024, overflow=overflow, batch=True
        )
        grown = emit_all(bus, count, subscription, slow)
        slow.free = True
        slow.go.release()  # the delivery it may be at; it holds no other
        bus.flush(DEADLINE)
        stats = subscription.stats

    assert total(stats) == count
    assert (stats.delivered, stats.queued, stats.failed) == (slow.count, 0, 0)
    assert slow.in_order
    assert (stats.dropped == 0) == (overflow in ("spill", "block"))
    assert (stats.spilled > count // 2) == (overflow == "spill")
    assert grown < 120


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_million_events_in_one_go() -> None:
    """A thread that does nothing but emit leaves the background no time to keep up; nothing is lost, in bounded memory."""
    count, slow, before = 1_000_000, Slow(), resident_mib()
    slow.free = True
    with Bus(drain_timeout=DEADLINE) as bus:
        subscription = bus.subscribe(slow, "after_train_iter", offload="thread", batch=True)
        emit(bus, count)
        grown = resident_mib() - before
        bus.flush(DEADLINE)
        stats = subscription.stats

    assert (stats.delivered, stats.dropped, stats.queued) == (count, 0, 0)
    assert slow.in_order
    assert grown < 200


@pytest.mark.representative(1)
@pytest.mark.parametrize("kind", ["loop", "thread"])
@in_every_policy
def test_account_is_exact_whoever_looks_whenever(kind: str, overflow: Any) -> None:
    """A thread that reads the accounts all the time never sees one that does not add up; neither do the health
    events, which tell of every drop and every failure."""
    emitted, wrong, over = 0, [], threading.Event()
    told = {"dropped": 0, "failed": 0}

    def every_tenth_fails(event: AfterTrainIter) -> None:
        if event.iter % 10 == 0:
            raise ValueError

    async def task(event: AfterTrainIter) -> None:
        every_tenth_fails(event)

    bus = Bus(drain_timeout=DEADLINE)
    bus.subscribe(lambda e: told.update(dropped=told["dropped"] + e.count), EventsDropped, offload="thread")
    bus.subscribe(lambda e: told.update(failed=told["failed"] + 1), HandlerFailed, offload="thread")
    subscription = bus.subscribe(
        every_tenth_fails if kind == "thread" else task, "after_train_iter", queue=4, overflow=overflow,
        on_error="log", offload="thread" if kind == "thread" else None,
    )  # fmt: skip

    def look() -> None:
        while not over.is_set():
            before = subscription.account()
            stats = subscription.account()
            if not (0 <= total(before) <= total(stats) <= emitted and stats.queued >= 0):
                wrong.append(stats)

    looker = threading.Thread(target=look)
    looker.start()
    rng = random.Random(1)
    while emitted < 3000:
        emitted += (count := rng.randrange(1, 100))
        emit(bus, count, start=emitted - count)
        assert total(subscription.stats) == emitted
    over.set()
    looker.join(DEADLINE)
    bus.close(DEADLINE)
    stats = subscription.stats

    assert wrong == []
    assert total(stats) == emitted
    assert (told["dropped"], told["failed"]) == (stats.dropped, stats.failed)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["thread", "task", "blocking task"])
@in_every_policy
def test_stalled_subscriber_is_given_up(held: Held, how: str, overflow: Any) -> None:
    """`stall_timeout` ends it with any policy: the delivery failed, what waited is dropped, the close is prompt."""
    told: list[HandlerFailed] = []
    bus = Bus()
    bus.subscribe(told.append, HandlerFailed)
    ways: dict[str, Any] = {"thread": held, "task": held.in_a_task, "blocking task": held.on_the_loop}
    subscription = bus.subscribe(
        ways[how], "after_train_iter", offload="thread" if how == "thread" else None, name="hung",
        queue=4, overflow=overflow, stall_timeout=0.1,
    )  # fmt: skip
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    emit(bus, 30 if overflow != "block" else 3, start=1)
    while not subscription.account().failed:
        bus.flush(0.05)
    held.let_go()
    bus.flush(DEADLINE)
    stats = subscription.stats
    bus.close(DEADLINE)
    bus.poll()

    assert (stats.delivered, stats.failed, stats.queued) == (0, 1, 0)
    assert stats.dropped == (30 if overflow != "block" else 3)
    assert [event.handler for event in told] == ["hung"]
    assert "[stalled]" in stats.error


@pytest.mark.slow
@in_every_policy
@pytest.mark.parametrize("kind", ["loop", "thread"])
def test_close_keeps_its_deadline_with_one_that_hangs(held: Held, kind: str, overflow: Any) -> None:
    """What it did not get is left, or was dropped by its policy; nothing is missing in the report."""
    bus = Bus()
    subscription = bus.subscribe(
        held if kind == "thread" else held.in_a_task, "after_train_iter", queue=50, overflow=overflow,
        offload="thread" if kind == "thread" else None,
    )  # fmt: skip
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    emit(bus, 49 if overflow == "block" else 500, start=1)
    emitted = 50 if overflow == "block" else 501
    report = bus.close(0.1)
    (stats,) = report.stats
    held.let_go()

    assert not report
    assert total(stats) == emitted
    waiting = {"spill": 501, "block": 50, "latest": 2}.get(overflow, 51)
    left = waiting if kind == "thread" else waiting - 1  # the task is torn out of its delivery
    assert stats.queued in (left, waiting)
    assert total(subscription.stats) == emitted


@pytest.mark.slow
@in_every_policy
@pytest.mark.parametrize("kind", ["loop", "thread"])
def test_subscriber_that_emits_events_itself(kind: str, overflow: Any) -> None:
    """It is fed with its own events, waits for nobody, and each of them is in its account."""
    emitted, seen = 0, 0

    def echo(event: AfterTrainIter) -> None:
        nonlocal emitted, seen
        seen += 1
        emitted += event.iter
        emit(bus, event.iter)  # each of which does the same

    async def task(event: AfterTrainIter) -> None:
        echo(event)

    with Bus(drain_timeout=DEADLINE) as bus:
        subscription = bus.subscribe(
            echo if kind == "thread" else task, "after_train_iter", queue=2, overflow=overflow,
            offload="thread" if kind == "thread" else None,
        )  # fmt: skip
        for _ in range(20):
            emit(bus, 5)
            bus.flush(DEADLINE)
        for _ in range(5):  # the echoes of echoes
            bus.flush(DEADLINE)
        stats = subscription.stats

    assert total(stats) == emitted + 100
    assert (stats.delivered, stats.queued) == (seen, 0)


@pytest.mark.slow
@in_every_policy
def test_subscribing_and_cancelling_from_another_thread_under_load(overflow: Any) -> None:
    """Whoever comes and goes hears an unbroken piece of the run, and those who stay miss nothing."""
    stays: list[int] = []
    pieces: list[tuple[Subscription, list[int]]] = []
    emitted, over = 0, threading.Event()

    def come_and_go(bus: Bus) -> None:
        while not over.is_set():
            heard: list[int] = []
            fn = lambda event, heard=heard: heard.append(event.iter)
            comes = bus.subscribe(fn, "after_train_iter", offload="thread", queue=200_000, overflow=overflow)
            bus.flush(DEADLINE)
            comes.cancel()
            pieces.append((comes, heard))

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
    for subscription, heard in pieces:
        stats = subscription.stats
        assert stats.queued == 0
        assert stats.delivered == len(heard)
        if heard and overflow != "latest":
            assert heard == list(range(heard[0], heard[0] + len(heard)))


@pytest.mark.slow
def test_events_of_two_subscribers_do_not_mix(small_files: Path) -> None:
    """Each has a file of its own."""
    seen: tuple[list[Event], list[Event]] = ([], [])
    gate = threading.Event()

    def to(heard: list[Event], event: Event) -> None:
        gate.wait(DEADLINE)
        heard.append(event)

    with Bus(drain_timeout=DEADLINE) as bus:
        bus.subscribe(lambda e: to(seen[0], e), "after_train_iter", every=2, offload="thread", queue=1)
        bus.subscribe(lambda e: to(seen[1], e), "after_train_iter", every=3, offload="thread", queue=1)
        emit(bus, 600)
        assert [total(stats) for stats in bus.stats()] == [300, 200]
        gate.set()
        bus.flush(DEADLINE)

    assert seen[0] == [AfterTrainIter(iter=i) for i in range(1, 600, 2)]
    assert seen[1] == [AfterTrainIter(iter=i) for i in range(2, 600, 3)]
