"""`overflow="spill"`: what a queue has no room for waits in a file, and nothing is lost."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, AfterVal, Event, ImageLogged
from tests.conftest import DEADLINE, Held
from tests.support.internals import close_in_time, substitute
from tests.support.process_support import until
from tests.support.spilling import (
    SIZE,
    Anything,
    emit,
    hold,
    in_both_kinds,
    iters,
    open_in,
    sees_open_files,
    subscribe,
    total,
)

# --- order -------------------------------------------------------------------------------------------------


@in_both_kinds
@pytest.mark.parametrize(("queue", "batch"), [(1, False), (1024, False), (3, True)])
def test_nothing_is_lost(bus: Bus, held: Held, kind: str, queue: int, batch: bool, small_files: Path) -> None:
    """However far behind a subscriber is, it gets every event, in order; a batch is at most a queue full."""
    subscription = hold(bus, held, kind, queue=queue, batch=batch)
    emit(bus, 1200, start=1)
    full = subscription.stats
    held.let_go()
    bus.flush(DEADLINE)

    batches = held.seen if batch else [[event] for event in held.seen]
    assert [event.iter for events in batches for event in events] == list(range(1201))
    assert max(map(len, batches)) <= queue
    assert (full.queued, full.peak_queued, full.spilled) == (1201, 1200, 1200 - queue)
    assert (subscription.stats.delivered, subscription.stats.dropped) == (1201, 0)


@pytest.mark.representative(2)
@in_both_kinds
@pytest.mark.parametrize("seed", range(3))
def test_order_is_kept_while_both_ends_move(bus: Bus, kind: str, seed: int, small_files: Path) -> None:
    """First in, first out, over queue and file, wherever the subscriber catches up and falls behind again."""
    seen: list[int] = []
    held_up = threading.Event()
    rng = random.Random(seed)
    stops = {rng.randrange(5000) for _ in range(50)}

    def inspect(event: AfterTrainIter) -> None:
        seen.append(event.iter)
        if event.iter in stops:
            held_up.wait(0.001)  # a moment's delay, nothing is awaited

    subscription = subscribe(bus, kind, inspect, queue=rng.randrange(1, 9))
    emitted = 0
    while emitted < 5000:
        count = rng.choice([1, 5, 50, 500])
        emit(bus, count, start=emitted)
        emitted += count
        if rng.random() < 0.3:
            assert total(subscription.stats) == emitted
    bus.flush(DEADLINE)

    assert seen == list(range(emitted))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A keeper that looks all the time and takes every subscriber for one that is behind; threads switch often."""
    substitute(monkeypatch, "background.POLL_SECONDS", 0.0002)
    substitute(monkeypatch, "supervision.BEHIND_SECONDS", 0.0)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
@in_both_kinds
@pytest.mark.usefixtures("hasty", "small_files")
def test_order_is_kept_while_the_keeper_moves_events(kind: str) -> None:
    """First in, first out, whichever thread moves events into the queue or the file."""
    seen: list[int] = []

    def inspect(event: AfterTrainIter) -> None:
        seen.append(event.iter)

    async def task(event: AfterTrainIter) -> None:
        seen.append(event.iter)

    fn, offload = (inspect, "thread") if kind == "thread" else (task, None)
    for capacity in (1, 2, 3, 5, 8) * 15:
        seen.clear()
        with Bus(drain_timeout=DEADLINE) as bus:
            bus.subscribe(fn, "after_train_iter", offload=offload, queue=capacity)
            emit(bus, 5000)

        assert seen == list(range(5000))


@pytest.mark.slow
def test_an_endless_flood_keeps_no_event_back(bus: Bus, held: Held) -> None:
    """The subscriber receives events while another thread still moves later ones to the file."""
    subscription = bus.subscribe(held, "after_train_iter", offload="thread", queue=10)
    deadline = monotonic() + DEADLINE
    while len(held.seen) < 100 and monotonic() < deadline:
        emit(bus, 1000)
        if subscription.stats.spilled:
            held.let_go()

    assert len(held.seen) >= 100


def test_types_keep_their_order(bus: Bus, held: Held, small_files: Path) -> None:
    """One file holds all the types that a subscriber hears, its own author's too; another subscriber has another file."""
    hold(bus, held)
    seen: list[Event] = []
    bus.subscribe(seen.append, "*", offload="thread", queue=1)
    events = [
        event
        for i in range(200)
        for event in (AfterTrainIter(iter=i), AfterVal(metrics={"a": i / 7}), Anything(value={"i": [i]}))
    ]
    for event in events:
        bus.emit(event)
    bus.flush(0.0)
    held.let_go()
    bus.flush(DEADLINE)

    assert seen == events
    assert iters(held.seen) == [0, *range(200)]


def test_large_events_spill(bus: Bus, held: Held, small_files: Path) -> None:
    """An event larger than a chunk is a chunk of its own."""
    bus.subscribe(held, ImageLogged, offload="thread", queue=1)
    images = [ImageLogged(step=i, data=bytes([i]) * 10_000, shape=(100, 100, 1)) for i in range(20)]
    for image in images:
        bus.emit(image)
    assert bus.stats()[0].queued == 20
    held.let_go()
    bus.flush(DEADLINE)

    assert held.seen == images


def test_events_it_emits_itself_spill_too(bus: Bus, small_files: Path) -> None:
    """A subscriber may emit more than it can take; it waits for nobody, and gets them all."""
    seen: list[int] = []
    emitted, last = threading.Event(), threading.Event()

    def multiply(event: AfterTrainIter) -> None:
        assert emitted.wait(DEADLINE)
        seen.append(event.iter)
        if event.iter < 10:
            emit(bus, 100, start=100 * (event.iter + 1))
        elif len(seen) == 1010:
            last.set()

    subscription = bus.subscribe(multiply, "after_train_iter", offload="thread", queue=1)
    emit(bus, 10)
    emitted.set()
    assert last.wait(DEADLINE)
    bus.flush(DEADLINE)

    assert seen == [*range(10), *range(100, 1100)]
    assert (subscription.stats.delivered, subscription.stats.queued) == (1010, 0)


# --- where and by whom -------------------------------------------------------------------------------------


@sees_open_files
def test_file_has_no_name_and_is_given_back(bus: Bus, held: Held, small_files: Path) -> None:
    """Nobody sees it in its folder, and it is closed once all of it was read."""
    subscription = hold(bus, held)
    emit(bus, 2000, start=1)
    assert subscription.stats.queued == 2001
    assert open_in(small_files) > 0
    assert list(small_files.iterdir()) == []
    held.let_go()
    bus.flush(DEADLINE)

    assert open_in(small_files) == 0


@pytest.mark.slow
@sees_open_files
def test_file_does_not_grow_under_a_subscriber_that_stays_behind(
    bus: Bus, held: Held, small_files: Path
) -> None:
    """What was read is given back, though the subscriber never catches up."""
    taken = threading.Semaphore(0)
    gone = threading.Semaphore(0)

    def slow(event: AfterTrainIter) -> None:
        taken.acquire(timeout=DEADLINE)
        gone.release()

    subscription = bus.subscribe(slow, "after_train_iter", offload="thread", queue=1)
    emit(bus, 200)
    most = 0
    for start in range(200, 5000, 50):
        emit(bus, 50, start)
        assert total(subscription.stats) == start + 50
        taken.release(50)
        for _ in range(50):
            assert gone.acquire(timeout=DEADLINE)
        most = max(most, open_in(small_files))
    taken.release(200)

    assert most <= 200 * SIZE / 1600 + 3


@pytest.mark.representative(2)
@sees_open_files
@pytest.mark.parametrize("end", ["cancel", "close", "error", "stall"])
def test_end_of_a_subscriber_removes_its_file(
    held: Held, small_files: Path, end: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However it ends: events that nobody will read take no space, and are accounted for."""
    bus = Bus()
    entered, release = threading.Event(), threading.Event()

    def ends(event: AfterTrainIter) -> None:
        entered.set()
        release.wait(DEADLINE)
        if end == "error":
            raise ValueError("no luck")

    subscription = bus.subscribe(
        ends,
        "after_train_iter",
        offload="thread",
        name="ends",
        queue=3,
        stall_timeout=0.1 if end == "stall" else 60.0,
    )
    emit(bus, 1000)
    assert entered.wait(DEADLINE)
    if end == "cancel":
        subscription.cancel()
    elif end == "close":
        close_in_time(monkeypatch)
        until(lambda: subscription.stats.spilled == 996)
        report = bus.close(0.1)
        assert [(s.name, s.queued, s.spilled) for s in report.stats] == [("ends", 1000, 996)]
        assert "closed after 0.1 s; events left undelivered: ends (1000)" in caplog.text
    elif end == "error":
        release.set()
        assert subscription.subscriber is not None
        assert subscription.subscriber.closed.wait(DEADLINE)
    else:
        while not subscription.stats.failed:
            bus.flush(0.05)
        bus.flush(0.0)
    stats = subscription.stats
    left = open_in(small_files)
    release.set()
    bus.close(DEADLINE)

    assert total(stats) == 1000
    if end in ("cancel", "close"):
        assert (stats.queued, stats.dropped) == ((1, 999) if end == "cancel" else (1000, 0))
    else:
        assert (stats.failed, stats.dropped) == (1, 999)
    assert left == 0


# --- close and flush ---------------------------------------------------------------------------------------


@in_both_kinds
def test_flush_and_close_wait_for_the_file(held: Held, kind: str, small_files: Path) -> None:
    """`on_flush` and `on_close` come after the last event of the file."""
    bus, at_flush, at_close = Bus(), list[int](), list[int]()
    hold(
        bus,
        held,
        kind,
        on_flush=lambda: at_flush.append(len(held.seen)),
        on_close=lambda: at_close.append(len(held.seen)),
    )
    emit(bus, 300, start=1)
    assert not bus.flush(0.0)
    held.let_go()
    bus.flush(DEADLINE)
    emit(bus, 300, start=301)

    assert bus.close(DEADLINE)
    assert iters(held.seen) == list(range(601))
    assert (301 in at_flush, at_close) == (True, [601])
