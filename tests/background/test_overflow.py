"""Full queues: what each policy keeps, which emits wait, and that every event is accounted for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from eventloop.background.queues.options import Overflow
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, AfterVal, Event, EventsDropped, ScalarsLogged
from tests.conftest import DEADLINE, Held
from tests.support.internals import substitute
from tests.support.process_support import until
from tests.support.spilling import emit, hold, in_both_kinds, iters, subscribe


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

    assert iters(held.seen) == kept
    assert (full.delivered, full.queued, full.dropped) == (0, len(kept), 10 - len(kept))
    assert full.peak_queued == len(kept) - 1
    assert (end.delivered, end.queued, end.dropped) == (len(kept), 0, 10 - len(kept))


def test_flush_waits_for_what_was_queued_before_newer_events_were_refused(bus: Bus, held: Held) -> None:
    """Events that drop_newest turns away later do not stand for the ones a flush waits for."""
    subscription = hold(bus, held, queue=2, overflow="drop_newest")
    emit(bus, 2, start=1)
    flushed: list[int] = []
    waiter = threading.Thread(target=lambda: flushed.append(bus.flush(DEADLINE).stats[0].delivered))
    waiter.start()
    emit(bus, 50, start=3)
    assert subscription.stats.dropped == 50
    held.let_go()
    waiter.join(DEADLINE)

    assert flushed == [3]


def test_drops_are_reported_as_an_event(held: Held) -> None:
    """`events_dropped` reaches background subscribers by itself and sync handlers through `poll`; the second of two
    bursts is reported before the end, though reports are a second apart."""
    bus, there = Bus(), threading.Event()
    told: list[Any] = []
    polled: list[EventsDropped] = []

    def watch(event: EventsDropped) -> None:
        told.append(event)
        there.set()

    bus.subscribe(watch, EventsDropped, offload="thread")
    bus.subscribe(polled.append, EventsDropped)
    subscription = hold(bus, held, queue=2, overflow="drop_newest")
    emit(bus, 10, start=1)
    assert there.wait(DEADLINE)
    assert polled == []
    bus.poll()
    assert polled == told
    assert (bus.latest(EventsDropped), told[0].handler) == (told[0], subscription.name)
    emit(bus, 10, start=11)
    held.let_go()
    bus.close(DEADLINE)
    bus.poll()

    assert polled == told
    assert sum(event.count for event in told) == 18


@pytest.mark.parametrize("overflow", ["drop_oldest", "drop_newest", "latest"])
def test_a_dropped_report_is_not_reported(
    bus: Bus, held: Held, monkeypatch: pytest.MonkeyPatch, overflow: Overflow
) -> None:
    """The report of it would be dropped by the same queue, and be the next one to report, for ever."""
    substitute(monkeypatch, "background.DROP_REPORT_SECONDS", 0.0)
    handlers: list[str] = []
    bus.subscribe(lambda event: handlers.append(event.handler), EventsDropped, offload="thread")
    full = bus.subscribe(held, EventsDropped, offload="thread", name="full", queue=1, overflow=overflow)
    source = Held()
    hold(bus, source, queue=1, overflow="latest")
    for number in range(5):
        emit(bus, 2, start=1 + 2 * number)
        until(lambda count=number: len(handlers) > count)  # type: ignore[misc]

    assert full.stats.dropped >= 1
    assert {*handlers} == {"held"}
    held.let_go()
    source.let_go()


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


# --- overflow="block" --------------------------------------------------------------------------------------


class Producer(threading.Thread):
    """Emits on a thread of its own, noting each emit that returned."""

    def __init__(self, emit_one: Callable[[int], object], numbers: range) -> None:
        super().__init__(daemon=True)
        self.returned: list[int] = []
        self.second = threading.Event()
        self._emit_one = emit_one
        self._numbers = numbers

    def run(self) -> None:
        for i in self._numbers:
            self._emit_one(i)
            self.returned.append(i)
            if len(self.returned) == 2:
                self.second.set()


@in_both_kinds
@pytest.mark.parametrize("queue", [1, 100])
def test_block_loses_nothing(bus: Bus, kind: str, queue: int) -> None:
    """However small the queue, every event is delivered, in order, and the queue holds no more."""
    seen: list[Any] = []
    subscription = subscribe(bus, kind, seen.append, queue=queue, overflow="block")
    emit(bus, 300)
    bus.flush(DEADLINE)

    assert iters(seen) == list(range(300))
    assert subscription.stats.dropped == 0
    assert subscription.stats.peak_queued <= queue


@in_both_kinds
def test_full_queue_holds_the_emitting_thread(bus: Bus, held: Held, kind: str) -> None:
    """The delivery under way and the queue are `queue` events; the emit after that returns with the first end."""
    subscription = hold(bus, held, kind, queue=3, overflow="block")
    producer = Producer(lambda i: bus.emit(AfterTrainIter(iter=i)), range(1, 6))
    producer.start()
    assert producer.second.wait(DEADLINE)
    queued = subscription.account().queued
    held.let_go()
    producer.join(DEADLINE)
    bus.flush(DEADLINE)

    assert queued == 3
    assert producer.returned == [1, 2, 3, 4, 5]
    assert iters(held.seen) == list(range(6))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["cancel", "close", "stall"])
def test_producer_is_let_go_when_the_subscriber_ends(held: Held, end: str) -> None:
    """No emit waits for a subscriber that is cancelled, closed or stalled."""
    bus = Bus()
    subscription = hold(bus, held, queue=1, overflow="block", stall_timeout=0.1 if end == "stall" else 60.0)
    producer = Producer(lambda i: bus.emit(AfterTrainIter(iter=i)), range(1, 4))
    producer.start()
    if end == "cancel":
        subscription.cancel()
    elif end == "close":
        bus.close(0.1)
    producer.join(DEADLINE)

    assert producer.returned == [1, 2, 3]
    bus.close(0.1)


def test_no_emit_waits_for_a_failed_subscriber(bus: Bus) -> None:
    """One disabled by its error lets the producer go on."""

    def fails(event: Event) -> None:
        raise ValueError

    subscription = bus.subscribe(fails, "after_train_iter", offload="thread", overflow="block", queue=1)
    emit(bus, 50)
    bus.flush(DEADLINE)

    assert (subscription.stats.failed, subscription.stats.dropped) == (1, 49)


@pytest.mark.parametrize("why", ["filter", "pause"])
def test_an_event_that_the_subscriber_does_not_get_never_waits(bus: Bus, held: Held, why: str) -> None:
    """Its filter holds the event back, or it is paused: the full queue does not matter."""
    when = (lambda event: event.iter % 10 == 0) if why == "filter" else None
    subscription = hold(bus, held, queue=1, overflow="block", when=when)
    if why == "pause":
        subscription.pause()

    emit(bus, 9, start=1)

    assert held.seen == []
    assert subscription.stats.queued == 1


class Ready:
    """One scalar whose value is there."""

    def __init__(self, step: int) -> None:
        self.step = step

    def ready(self) -> bool:
        return True

    def events(self) -> list[Event]:
        return [ScalarsLogged(step=self.step)]


def test_put_of_a_value_waits_as_an_emit_does(bus: Bus, held: Held) -> None:
    """Events born in the background hold the thread that puts their values."""
    bus.subscribe(held, "scalars_logged", offload="thread", overflow="block", queue=2)
    bus.post(Ready(0), ScalarsLogged)
    assert held.entered.wait(DEADLINE)
    producer = Producer(lambda i: bus.post(Ready(i), ScalarsLogged), range(1, 40))
    producer.start()
    held.let_go()
    producer.join(DEADLINE)
    bus.flush(DEADLINE)

    assert [event.step for event in held.seen] == list(range(40))
