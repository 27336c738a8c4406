"""`overflow="spill"`: what a queue has no room for waits in a file, and nothing is lost."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from eventloop.background.gil_scheduler import Pace
from eventloop.background.queues import spill
from eventloop.background.queues.options import LaneOptions
from eventloop.background.runners import ThreadLane
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, AfterVal, Event, ImageLogged
from eventloop.events.codec import Frames
from tests.conftest import DEADLINE, Held
from tests.support.spilling import SIZE, Anything, emit, hold, in_both_kinds, open_in, sees_open_files, total

# --- order -------------------------------------------------------------------------------------------------


@pytest.mark.representative(2)
@in_both_kinds
@pytest.mark.parametrize("queue", [1, 1024])
def test_nothing_is_lost(bus: Bus, held: Held, kind: str, queue: int, small_files: Path) -> None:
    """However far behind a subscriber is, it gets every event, in order."""
    subscription = hold(bus, held, kind, queue=queue)
    emit(bus, 1200, start=1)
    full = subscription.stats
    held.let_go()
    bus.flush(DEADLINE)

    assert [event.iter for event in held.seen] == list(range(1201))
    assert (full.queued, full.peak_queued, full.spilled) == (1201, 1200, 1200 - queue)
    assert (subscription.stats.delivered, subscription.stats.dropped) == (1201, 0)


class RefilledWhileLookedAt(deque[Event]):
    """A queue that is refilled from the file between two looks at it, by another thread."""

    refill: Callable[[], object] | None = None

    def __len__(self) -> int:
        length = super().__len__()
        if (refill := self.refill) is not None and threading.current_thread() is threading.main_thread():
            self.refill = None
            other = threading.Thread(target=refill)
            other.start()
            other.join(0.05)  # it may have to wait until the look is over
        return length


@pytest.mark.parametrize("together", [False, True])
def test_queue_that_is_refilled_while_it_is_looked_at_loses_nothing(
    small_files: Path, together: bool
) -> None:
    """Whoever feeds it sees queue and file at one moment: not a queue before, and a file after the refill."""
    lane = ThreadLane(
        "slow", lambda event: None, LaneOptions(queue=2), lambda *args: None, Pace()
    )  # its thread is not started
    queue = RefilledWhileLookedAt()
    lane.buffer = queue
    for i in range(4):
        lane.put(AfterTrainIter(iter=i), None)
    for _ in range(2):
        lane._take()

    queue.refill = lambda: lane._spill.refill(queue)
    event = AfterTrainIter(iter=4)
    if not (together and lane.put_many([event])):
        lane.put(event, None)

    assert lane.account.dropped == 0
    lane.give_up("closed")
    lane.release()


def test_a_flush_is_not_taken_for_what_is_just_being_turned_away() -> None:
    """It looks at the account at one moment: not when a drop is entered, and that it came before older ones is not."""
    lane = ThreadLane("slow", lambda event: None, LaneOptions(), lambda *args: None, Pace())  # not started
    lane.put(AfterTrainIter(iter=0), None)
    number = lane.flush_soon()
    looks = threading.Thread(target=lane._flush_if_due)
    with lane._account:
        lane.accepted += 1
        lane.dropped += 1
        looks.start()
        looks.join(0.05)  # it may have to wait
        lane._turned_away += 1
    looks.join()

    assert not lane.wait_flushed(0.0, number)
    lane.give_up("closed")


@in_both_kinds
def test_batches_come_from_queue_and_file_alike(bus: Bus, held: Held, kind: str, small_files: Path) -> None:
    """A batch is at most a queue full, and the next one is read from the file."""
    hold(bus, held, kind, batch=True)
    emit(bus, 500, start=1)
    held.let_go()
    bus.flush(DEADLINE)

    assert [event.iter for batch in held.seen for event in batch] == list(range(501))
    assert max(len(batch) for batch in held.seen) == 3


@pytest.mark.representative(2)
@in_both_kinds
@pytest.mark.parametrize("seed", range(3))
def test_order_is_kept_while_both_ends_move(bus: Bus, kind: str, seed: int, small_files: Path) -> None:
    """First in, first out, over queue and file, wherever the subscriber catches up and falls behind again."""
    seen: list[int] = []
    held_up = threading.Event()
    rng = random.Random(seed)
    stops = {rng.randrange(5000) for _ in range(50)}

    def look(event: AfterTrainIter) -> None:
        seen.append(event.iter)
        if event.iter in stops:
            held_up.wait(0.001)  # a moment's delay, nothing is awaited

    async def task(event: AfterTrainIter) -> None:
        look(event)

    fn, offload = (look, "thread") if kind == "thread" else (task, None)
    subscription = bus.subscribe(fn, "after_train_iter", offload=offload, queue=rng.randrange(1, 9))
    emitted = 0
    while emitted < 5000:
        count = rng.choice([1, 5, 50, 500])
        emit(bus, count, start=emitted)
        emitted += count
        if rng.random() < 0.3:
            assert total(subscription.stats) == emitted
    bus.flush(DEADLINE)

    assert seen == list(range(emitted))
    assert subscription.stats.spilled > 0


def test_types_keep_their_order(bus: Bus, held: Held, small_files: Path) -> None:
    """One file holds all the types that a subscriber hears, its own author's too."""
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


def test_large_events_spill(bus: Bus, held: Held, small_files: Path) -> None:
    """An event larger than a chunk, and than a file, is a chunk and a file of its own."""
    bus.subscribe(held, ImageLogged, offload="thread", queue=1, name="held")
    images = [ImageLogged(step=i, data=bytes([i]) * 10_000, shape=(100, 100, 1)) for i in range(20)]
    for image in images:
        bus.post(Ready(image), ImageLogged)
    assert bus.stats()[0].queued == 20
    held.let_go()
    bus.flush(DEADLINE)

    assert held.seen == images


class Ready:
    """An event of the background, whose value is there."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def ready(self) -> bool:
        return True

    def events(self) -> list[Event]:
        return [self.event]


def test_events_it_emits_itself_spill_too(bus: Bus, small_files: Path) -> None:
    """A subscriber may emit more than it can take; it waits for nobody, and gets them all."""
    seen: list[int] = []
    last = threading.Event()

    def multiply(event: AfterTrainIter) -> None:
        seen.append(event.iter)
        if event.iter < 10:
            emit(bus, 100, start=100 * (event.iter + 1))
        elif len(seen) == 1010:
            last.set()

    subscription = bus.subscribe(multiply, "after_train_iter", offload="thread", queue=1)
    emit(bus, 10)
    assert last.wait(DEADLINE)
    bus.flush(DEADLINE)

    assert seen == [*range(10), *range(100, 1100)]
    assert (subscription.stats.delivered, subscription.stats.queued) == (1010, 0)
    assert subscription.stats.spilled > 0


# --- where and by whom -------------------------------------------------------------------------------------


def test_the_emitting_thread_neither_encodes_nor_writes(
    bus: Bus, held: Held, small_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of that is done in the background."""
    at_work: set[str] = set()
    encode, append, read = Frames.encode, spill.Segment.append, spill.Segment.read

    def note(fn: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            at_work.add(f"{fn.__name__}: {threading.current_thread().name}")
            return fn(*args)

        return noted

    monkeypatch.setattr(Frames, "encode", note(encode))
    monkeypatch.setattr(spill.Segment, "append", note(append))
    monkeypatch.setattr(spill.Segment, "read", note(read))
    hold(bus, held)
    emit(bus, 2000, start=1)
    bus.stats()
    held.let_go()
    bus.flush(DEADLINE)

    assert at_work == {
        "encode: eventloop background",
        "append: eventloop background",
        "read: eventloop held",
    }


@sees_open_files
def test_file_has_no_name_and_is_given_back(bus: Bus, held: Held, small_files: Path) -> None:
    """Nobody sees it in its folder, and it is closed once all of it was read."""
    subscription = hold(bus, held)
    emit(bus, 2000, start=1)
    assert subscription.stats.queued == 2001
    assert open_in(small_files) > 10
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


@sees_open_files
@pytest.mark.parametrize("end", ["cancel", "close", "error", "stall"])
def test_end_of_a_subscriber_removes_its_file(
    held: Held, small_files: Path, end: str, caplog: pytest.LogCaptureFixture
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
        ends, "after_train_iter", offload="thread", queue=3, stall_timeout=0.1 if end == "stall" else 60.0
    )
    emit(bus, 1000)
    assert entered.wait(DEADLINE)
    if end == "cancel":
        subscription.cancel()
    elif end == "close":
        bus.close(0.1)
    elif end == "error":
        release.set()
        assert subscription.lane is not None
        assert subscription.lane.closed.wait(DEADLINE)
    else:
        while not subscription.stats.failed:
            bus.flush(0.05)
        bus.flush(0.0)
    stats = subscription.stats
    left = open_in(small_files)
    release.set()
    bus.close(DEADLINE)

    assert total(stats) == 1000
    assert {
        "cancel": (stats.queued, stats.dropped) == (1, 999),
        "close": (stats.queued, stats.dropped) == (1000, 0),
        "error": (stats.failed, stats.dropped) == (1, 999),
        "stall": (stats.failed, stats.dropped) == (1, 999),
    }[end]
    assert left == 0


@pytest.mark.slow
def test_killed_process_leaves_no_file(python: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    """The file never had a name."""
    program = """
import os, signal, threading
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter

bus = Bus()
slow = bus.subscribe(lambda event: threading.Event().wait(), "after_train_iter", offload="thread", queue=1)
for i in range(20_000):
    bus.emit(AfterTrainIter(iter=i))
print(slow.stats.spilled, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = python(program, TMPDIR=str(tmp_path))

    assert int(done.stdout) > 19_000, done.stderr
    assert list(tmp_path.iterdir()) == []


# --- close and flush ---------------------------------------------------------------------------------------


def test_close_keeps_its_deadline_and_names_what_is_left(
    held: Held, small_files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A hung subscriber costs its timeout; the events in its file are in the report, as left."""
    bus = Bus()
    subscription = hold(bus, held)
    emit(bus, 1000, start=1)

    report = bus.close(0.2)
    held.let_go()

    assert not report
    assert [(s.name, s.queued, s.spilled) for s in report.stats] == [("held", 1001, 997)]
    assert "closed after 0.2 s; events left undelivered: held (1001)" in caplog.text
    assert total(subscription.stats) == 1001


@in_both_kinds
def test_close_delivers_what_is_in_the_file(held: Held, kind: str, small_files: Path) -> None:
    """`on_close` comes after the last event of the file."""
    bus, ends = Bus(), []
    hold(bus, held, kind, on_close=lambda: ends.append(len(held.seen)))
    emit(bus, 300, start=1)
    held.let_go()

    assert bus.close(DEADLINE)
    assert [event.iter for event in held.seen] == list(range(301))
    assert ends == [301]


def test_flush_waits_for_the_file(bus: Bus, held: Held, small_files: Path) -> None:
    """`on_flush` comes after all that was emitted before, and need not wait for what came later."""
    at_flush: list[int] = []
    hold(bus, held, on_flush=lambda: at_flush.append(len(held.seen)))
    emit(bus, 300, start=1)
    assert not bus.flush(0.0)
    held.let_go()
    bus.flush(DEADLINE)

    assert at_flush[-1] == 301
