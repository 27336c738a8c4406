"""The background loop is held, by a coroutine that blocks it: nothing that was emitted is missing from an account."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from time import monotonic, perf_counter

import pytest

from eventloop.background import draining
from eventloop.background.gil_scheduler import HOLD_SECONDS, Pace
from eventloop.background.loop import HURRY
from eventloop.background.queues.options import LaneOptions
from eventloop.background.queues.spill import Segment
from eventloop.background.queues.subscriber import Route
from eventloop.background.router import Router
from eventloop.background.runners import ThreadLane
from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import AfterTrainIter, AfterValIter, BeforeRun, Event, EventsDropped, HandlerFailed
from tests.conftest import DEADLINE
from tests.support.process_support import until, waits_long
from tests.support.spilling import emit

Run = Callable[..., "subprocess.CompletedProcess[str]"]

COUNT = 100


class HeldBus:
    """A bus whose loop is held until `let_go`, and a subscriber that was not given anything yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("eventloop.bus.subscribers._ROUTE_SECONDS", 0.01)
        self.bus, self.seen = Bus(drain_timeout=DEADLINE), list[int]()
        self._holds, self._go = threading.Event(), threading.Event()

        @self.bus.on("before_run")
        async def hold(event: BeforeRun) -> None:
            self._holds.set()
            self._go.wait(DEADLINE)

        self.subscription = self.subscribe("first")
        self.bus.emit(BeforeRun())
        self.bus.flush(0.0)
        assert self._holds.wait(DEADLINE)

    def subscribe(self, name: str) -> Subscription:
        return self.bus.subscribe(
            lambda event: self.seen.append(event.iter), "after_train_iter", offload="thread", name=name
        )

    def emit(self, start: int = 0) -> None:
        for number in range(start, start + COUNT):
            self.bus.emit(AfterTrainIter(iter=number))

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldBus]:
    held = HeldBus(monkeypatch)
    yield held
    held.let_go()
    held.bus.close()


def account(subscription: Subscription) -> tuple[int, int, int]:
    """Delivered, dropped, left."""
    stats = subscription.stats
    return stats.delivered, stats.dropped, stats.queued


def test_what_is_on_the_way_is_left(held: HeldBus) -> None:
    """Of a subscription, and of the bus."""
    held.emit()

    assert account(held.subscription) == (0, 0, COUNT)
    assert [stats.queued for stats in held.bus.stats() if stats.name == "first"] == [COUNT]


def test_who_cancels_is_charged_with_what_was_on_the_way(held: HeldBus) -> None:
    """It is dropped, as what waits in a queue is."""
    held.emit()
    held.subscription.cancel()
    held.emit()
    held.let_go()
    held.bus.close()

    assert account(held.subscription) == (0, COUNT, 0)
    assert held.seen == []


def test_who_pauses_is_given_what_came_before(held: HeldBus) -> None:
    """And what comes after it has gone on; nothing between."""
    held.emit(0)
    held.subscription.pause()
    held.emit(COUNT)
    held.subscription.resume()
    held.emit(2 * COUNT)
    held.let_go()
    held.bus.close()

    assert held.seen == [*range(COUNT), *range(2 * COUNT, 3 * COUNT)]
    assert account(held.subscription) == (2 * COUNT, 0, 0)


def test_who_comes_is_not_given_what_came_before(held: HeldBus) -> None:
    """Its own events begin with its subscription; those of others change by nothing."""
    held.emit(0)
    late = held.subscribe("late")
    held.emit(COUNT)
    held.let_go()
    held.bus.close()

    assert account(late) == (COUNT, 0, 0)
    assert account(held.subscription) == (2 * COUNT, 0, 0)


def test_who_comes_meanwhile_is_owed_what_comes_then(held: HeldBus) -> None:
    """What is on the way to a subscriber that the loop does not know of yet is in its account."""
    held.emit()
    late = held.subscribe("late")
    held.emit(COUNT)

    assert account(late) == (0, 0, COUNT)
    assert account(held.subscription) == (0, 0, 2 * COUNT)


def test_what_a_cancel_drops_is_told() -> None:
    """All of it, also what was dropped within a second after the last time that was told."""
    bus, told = Bus(), list[EventsDropped]()
    bus.subscribe(told.append, "events_dropped")
    entered, leave = threading.Event(), threading.Event()

    def waits(event: AfterTrainIter) -> None:
        entered.set()
        assert leave.wait(DEADLINE)

    subscription = bus.subscribe(
        waits, "after_train_iter", offload="thread", queue=10, overflow="drop_newest"
    )
    for number in range(COUNT):
        bus.emit(AfterTrainIter(iter=number))
    bus.flush(0.0)
    assert entered.wait(DEADLINE)
    subscription.cancel()
    leave.set()
    bus.close(DEADLINE)
    bus.poll()

    assert sum(event.count for event in told) == subscription.stats.dropped >= COUNT - 1


def test_a_disk_that_hangs_holds_no_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is held in the spill file: who closes does not go where it is, and counts what is left."""
    hangs, go = threading.Event(), threading.Event()
    append = Segment.append

    def slow(segment: Segment, data: bytes) -> int:
        hangs.set()
        assert go.wait(DEADLINE)
        return append(segment, data)

    monkeypatch.setattr(Segment, "append", slow)
    monkeypatch.setattr("eventloop.bus.subscribers._ROUTE_SECONDS", 0.01)
    bus = Bus()
    entered, leave = threading.Event(), threading.Event()

    def waits(event: AfterTrainIter) -> None:
        entered.set()
        assert leave.wait(DEADLINE)

    subscription = bus.subscribe(waits, "after_train_iter", offload="thread", queue=1)
    bus.emit(AfterTrainIter(iter=0))
    assert entered.wait(DEADLINE)
    for number in range(3000):  # more than are kept in memory before they are written
        bus.emit(AfterTrainIter(iter=number))
    bus.flush(0.0)
    assert hangs.wait(DEADLINE)
    bus.emit(AfterTrainIter(iter=3000))

    report = bus.close(0.1)
    closed_first = not go.is_set()
    go.set()
    leave.set()

    assert closed_first
    assert not report.complete
    until(lambda: sum(account(subscription)) == 3002)  # what the loop had in its hands, too


@pytest.mark.parametrize("before", [0, 200])
def test_what_a_hanging_disk_holds_up_is_left(monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    """The loop is held in one subscriber's spill file, with events in hand for all, one by one in the warm-up and later
    together: each is in every account at once, and in those of the close."""
    hangs, go = threading.Event(), threading.Event()

    def slow(segment: Segment, data: bytes) -> int:
        hangs.set()
        assert go.wait(DEADLINE)
        return 0

    monkeypatch.setattr(Segment, "append", slow)
    monkeypatch.setattr("eventloop.background.queues.spill.CHUNK_BYTES", 100)
    monkeypatch.setattr("eventloop.bus.subscribers._ROUTE_SECONDS", 0.01)
    bus, leave = Bus(), threading.Event()
    for number in range(before):
        bus.emit(AfterTrainIter(iter=number))

    def waits(event: AfterTrainIter) -> None:
        assert leave.wait(DEADLINE)

    def fast(event: AfterTrainIter) -> None:
        pass

    behind = bus.subscribe(waits, "after_train_iter", offload="thread", queue=2)
    beside = bus.subscribe(fast, "after_train_iter", offload="thread")
    full = bus.subscribe(
        waits, "after_train_iter", offload="thread", queue=1, overflow="drop_newest", name="full"
    )
    for number in range(1000):
        bus.emit(AfterTrainIter(iter=number))
    bus.flush(0.0)
    assert hangs.wait(DEADLINE)
    held = [sum(account(subscription)) for subscription in (behind, beside, full)]
    bus.close(0.1)
    closed = [sum(account(subscription)) for subscription in (behind, beside, full)]
    go.set()
    leave.set()

    assert held == closed == [1000] * 3


def test_where_filters_are_asked_no_more_the_others_are_given_theirs() -> None:
    """As in a close of whose time a filter took all: who has one is charged unasked, nobody else."""
    seen: dict[str, list[int]] = {"asked": [], "other": []}
    with Bus(drain_timeout=DEADLINE) as bus:
        asked = bus.subscribe(
            lambda event: seen["asked"].append(event.iter), AfterTrainIter, offload="thread", when=lambda event: True
        )  # fmt: skip
        other = bus.subscribe(
            lambda event: seen["other"].append(event.iter), AfterTrainIter, offload="thread"
        )
        emit(bus, 2)
        bus.flush(DEADLINE)
        bus._background._router.asks = False
        emit(bus, 3, start=2)
        bus.flush(DEADLINE)

    assert seen == {"asked": [0, 1], "other": [0, 1, 2, 3, 4]}
    assert (asked.stats.dropped, other.stats.dropped) == (3, 0)


def test_what_a_filter_that_hangs_in_a_close_holds_up_is_charged_to_all(held: HeldBus) -> None:
    """Also what was counted before it was asked, and what would have come after: of everybody, once."""
    hangs = threading.Event()

    def wants(event: Event) -> bool:
        return hangs.wait(DEADLINE)

    asked = held.bus.subscribe(lambda event: None, "after_val_iter", offload="thread", when=wants)
    for number in range(3):
        held.emit(COUNT * number)
        held.bus.emit(AfterValIter(iter=number))
    held.bus.close(0.05)
    of_others, of_its_own = account(held.subscription), asked.stats
    hangs.set()

    assert of_others == (0, 3 * COUNT, 0)
    assert (of_its_own.failed, of_its_own.dropped) == (1, 2)


@pytest.mark.slow
def test_a_filter_of_health_events_that_hangs_holds_no_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who closes gives the others what a coroutine has held up, and asks nobody itself who may not come back."""
    monkeypatch.setattr(draining, "HELD_SECONDS", 0.05)
    bus, hangs, holds, go = Bus(), threading.Event(), threading.Event(), threading.Event()

    async def hold(event: Event) -> None:
        holds.set()
        go.wait(DEADLINE)

    holding = bus.subscribe(hold, "before_run")
    told = bus.subscribe(
        lambda event: None, HandlerFailed, offload="thread", when=lambda event: hangs.wait(DEADLINE)
    )
    bus.emit(BeforeRun())
    bus.flush(0.0)
    assert holds.wait(DEADLINE)
    assert not bus.flush(0.1)
    waits_long(holding)
    bus._background._tell(HandlerFailed(handler="broken", error="ValueError"), None)
    began = monotonic()

    bus.close(DEADLINE)
    took = monotonic() - began
    hangs.set()
    go.set()

    assert took < DEADLINE / 2
    assert (told.stats.delivered, told.stats.failed) == (0, 1)


def test_who_has_left_a_filter_is_in_none_although_others_are() -> None:
    """Two threads ask, as where a close does beside the loop: whoever comes first, and goes first."""
    router, told = Router({}), dict[int, bool]()
    events: list[Event] = [AfterTrainIter(iter=number) for number in range(2)]
    doors = [threading.Event(), threading.Event()]
    entered = [threading.Event(), threading.Event()]

    def wants(event: Event) -> bool:
        number = events.index(event)
        entered[number].set()
        return doors[number].wait(DEADLINE)

    def ask(number: int) -> None:
        router.route(events[number])
        told[number] = router.asks_here
        doors[1 - number].set()
        last.wait()
        told[number] |= router.asks_here

    lane = ThreadLane("asked", lambda event: None, LaneOptions(), lambda *args: None, Pace())  # not started
    router.publish({AfterTrainIter: (Route(lane, wants),)})()
    last = threading.Barrier(2, timeout=DEADLINE)
    threads = [threading.Thread(target=ask, args=[number]) for number in range(2)]
    for thread, has_entered in zip(threads, entered, strict=True):
        thread.start()
        assert has_entered.wait(DEADLINE)
    doors[0].set()
    for thread in threads:
        thread.join()

    assert told == {0: False, 1: False}
    lane.give_up("closed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loop", "thread"])
def test_who_is_given_much_at_once_begins_before_all_of_it_is_routed(held: HeldBus, kind: str) -> None:
    """A loop that comes back to a full inbox is at it for long: meanwhile the others have their turns."""
    left: list[int] = []

    def hears(event: AfterTrainIter) -> None:
        if not left:
            left.append(len(held.bus._background.inbox))

    async def task(event: AfterTrainIter) -> None:
        hears(event)

    fn, offload = (hears, "thread") if kind == "thread" else (task, None)
    held.bus.subscribe(fn, "after_train_iter", offload=offload)
    for number in range(20 * HURRY):
        held.bus.emit(AfterTrainIter(iter=number))
    held.let_go()
    held.bus.flush(DEADLINE)

    assert left[0] > 0


ON_AND_ON = """
import threading, time
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter

bus = Bus(drain_timeout=0.5)
emitted = threading.Event()
for number in range(3):
    bus.subscribe(lambda event: None, "after_train_iter", offload="thread", name=f"subscriber {number}")

def emit():
    while True:
        for _ in range(1000):
            bus.emit(AfterTrainIter())
        emitted.set()

threading.Thread(target=emit, daemon=True).start()
emitted.wait(50)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["bus.close(0.1)\nprint('closed', flush=True)\nimport os\nos._exit(0)", ""])
def test_who_emits_on_and_on_keeps_no_close_from_its_end(python: Run, end: str) -> None:
    """What is emitted while it ends is dropped and counted; neither a close nor an exit waits for the last of it."""
    ran = python(ON_AND_ON + end)

    assert ran.returncode == 0
    assert ran.stdout == ("closed\n" if end else "")


def test_a_coroutine_that_awaits_nothing_leaves_others_their_turns() -> None:
    """Where one computes, delivery after delivery, the others are heard in between, not when its queue is empty."""
    computed, heard_after = [0], list[int]()
    with Bus(drain_timeout=DEADLINE) as bus:

        @bus.on("after_train_iter")
        async def compute(event: AfterTrainIter) -> None:
            until = perf_counter() + 2 * HOLD_SECONDS
            while perf_counter() < until:
                pass
            computed[0] += 1

        @bus.on("after_train_iter", every=COUNT)
        async def post(event: AfterTrainIter) -> None:
            heard_after.append(computed[0])

        for number in range(COUNT):
            bus.emit(AfterTrainIter(iter=number))

    assert computed == [COUNT]
    assert len(heard_after) == 1
    assert heard_after[0] < COUNT / 2
