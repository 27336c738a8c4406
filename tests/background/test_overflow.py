"""Full queues: what each policy keeps, and that every event is accounted for."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.bus.subscription import SubscriptionStats
from eventloop.events import AfterTrainIter, AfterVal, Event, EventsDropped, ScalarsLogged
from tests.conftest import DEADLINE, Held

in_both_kinds = pytest.mark.parametrize("kind", ["loop", "thread"])


def emit(bus: Bus, times: int, start: int = 0) -> None:
    for i in range(start, start + times):
        bus.emit(AfterTrainIter(iter=i))


def hold(bus: Bus, held: Held, kind: str, **options: Any) -> Any:
    """Subscribe `held` and emit event 0, which it is now busy with."""
    fn, offload = (held, "thread") if kind == "thread" else (held.in_a_task, None)
    subscription = bus.subscribe(fn, "after_train_iter", offload=offload, **options)
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    return subscription


def total(stats: SubscriptionStats) -> int:
    return stats.delivered + stats.failed + stats.dropped + stats.queued


@pytest.mark.representative(2)
@in_both_kinds
@pytest.mark.parametrize(
    ("overflow", "kept"),
    [
        ("spill", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("drop_oldest", [0, 7, 8, 9]),
        ("drop_newest", [0, 1, 2, 3]),
        ("latest", [0, 9]),
    ],
)
def test_full_queue_keeps_what_its_policy_says(
    bus: Bus, held: Held, kind: str, overflow: str, kept: list[int]
) -> None:
    """Of ten events, the delivery under way and the queue survive; the rest is dropped, and counted."""
    subscription = hold(bus, held, kind, queue=3, overflow=overflow)
    emit(bus, 9, start=1)
    full = subscription.stats
    held.let_go()
    bus.flush(DEADLINE)
    end = subscription.stats

    assert [event.iter for event in held.seen] == kept
    assert (full.delivered, full.queued, full.dropped) == (0, len(kept), 10 - len(kept))
    assert full.peak_queued == len(kept) - 1
    assert (end.delivered, end.queued, end.dropped) == (len(kept), 0, 10 - len(kept))


@pytest.mark.representative(2)
@in_both_kinds
@pytest.mark.parametrize("overflow", ["spill", "drop_oldest", "drop_newest", "latest"])
def test_a_batch_subscriber_overflows_alike(bus: Bus, held: Held, kind: str, overflow: str) -> None:
    """The events of a batch under way are queued until it has ended."""
    subscription = hold(bus, held, kind, queue=3, overflow=overflow, batch=True)
    emit(bus, 9, start=1)

    assert total(subscription.stats) == 10
    held.let_go()
    bus.flush(DEADLINE)
    assert total(subscription.stats) == 10
    assert subscription.stats.queued == 0
    assert sum(len(batch) for batch in held.seen) == subscription.stats.delivered


@pytest.mark.representative(2)
@in_both_kinds
@pytest.mark.parametrize("overflow", ["spill", "drop_oldest", "drop_newest", "latest", "block"])
@pytest.mark.parametrize("batch", [False, True, 2])
def test_account_is_exact_at_any_moment(bus: Bus, kind: str, overflow: Any, batch: bool | int) -> None:
    """`emitted == delivered + failed + dropped + queued`, whenever it is looked at, failures included."""

    def sometimes_fails(event: Any) -> None:
        first = event[0] if batch else event
        if first.iter % 7 == 0:
            raise ValueError

    async def task(event: Any) -> None:
        sometimes_fails(event)

    subscription = bus.subscribe(
        sometimes_fails if kind == "thread" else task, "after_train_iter", queue=5, overflow=overflow, batch=batch,
        on_error="log", offload="thread" if kind == "thread" else None,
    )  # fmt: skip
    rng, emitted = random.Random(0), 0
    for _ in range(40):
        count = rng.randrange(20)
        emit(bus, count, start=emitted)
        emitted += count
        assert total(subscription.stats) == emitted
    bus.flush(DEADLINE)

    assert total(subscription.stats) == emitted
    assert subscription.stats.queued == 0


def test_flush_waits_for_what_was_queued_before_newer_events_were_refused(bus: Bus, held: Held) -> None:
    """Events that drop_newest turns away later do not stand for the ones a flush waits for."""
    subscription = hold(bus, held, "thread", queue=2, overflow="drop_newest")
    emit(bus, 2, start=1)
    flushed: list[int] = []
    waiter = threading.Thread(target=lambda: flushed.append(bus.flush(DEADLINE).stats[0].delivered))
    waiter.start()
    emit(bus, 50, start=3)
    assert subscription.stats.dropped == 50
    held.let_go()
    waiter.join(DEADLINE)

    assert flushed == [3]


@pytest.mark.slow
@in_both_kinds
def test_drops_are_told_as_an_event(bus: Bus, held: Held, kind: str) -> None:
    """`events_dropped` reaches background subscribers by itself and sync handlers through `poll`."""
    told: list[Any] = []
    there = threading.Event()

    def watch(event: EventsDropped) -> None:
        told.append(event)
        there.set()

    mailed: list[EventsDropped] = []
    bus.subscribe(watch, EventsDropped, offload="thread")
    bus.subscribe(mailed.append, "events_dropped")
    subscription = hold(bus, held, kind, queue=2, overflow="drop_oldest")
    emit(bus, 9, start=1)
    assert there.wait(DEADLINE)
    assert mailed == []
    bus.poll()

    assert mailed == told == [EventsDropped(handler=subscription.name, count=7)]
    assert bus.latest(EventsDropped) == told[0]


def test_drops_nobody_was_told_of_are_told_at_the_close(held: Held) -> None:
    """The second of two bursts is reported before the end, though reports are a second apart."""
    told: list[EventsDropped] = []
    bus = Bus()
    bus.subscribe(told.append, EventsDropped)
    hold(bus, held, "thread", queue=2, overflow="drop_newest")
    for start in (1, 11):
        emit(bus, 10, start)
        bus.stats()
    held.let_go()
    bus.close(DEADLINE)
    bus.poll()

    assert sum(event.count for event in told) == 18


class Packet:
    """A deferred of ten events, whose values may not be there, or cannot be had."""

    def __init__(self, *, ready: bool = True, fails: bool = False) -> None:
        self._ready, self._fails = ready, fails

    def ready(self) -> bool:
        return self._ready

    def events(self) -> list[Event]:
        if self._fails:
            raise ArithmeticError("no value")
        return [ScalarsLogged(mode="train", iter=i, epoch=0, step=i, scalars={"a": 1.0}) for i in range(10)]


def test_filtered_events_are_in_no_account(bus: Bus) -> None:
    """What the filter held back was never for this subscriber."""
    subscription = bus.subscribe(
        lambda event: None, "after_train_iter", when=lambda event: event.iter < 3, offload="thread"
    )

    emit(bus, 10)

    assert total(subscription.stats) == 3


def test_queue_of_one_event_type_may_be_overrun_by_another(bus: Bus, held: Held) -> None:
    """A subscriber has one queue for all of its events, in the order of the emits."""
    subscription = bus.subscribe(
        held, "after_train_iter", "after_val", offload="thread", queue=2, overflow="drop_oldest"
    )
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    for event in (AfterTrainIter(iter=1), AfterVal(), AfterVal()):
        bus.emit(event)
    assert subscription.stats.dropped == 1
    held.let_go()
    bus.flush(DEADLINE)

    assert [type(event).__name__ for event in held.seen] == ["AfterTrainIter", "AfterVal", "AfterVal"]
