"""`overflow="block"`: the producer waits, chosen knowingly, and never for nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, Event, ScalarsLogged
from tests.conftest import DEADLINE, Held

in_both_kinds = pytest.mark.parametrize("kind", ["loop", "thread"])


def emit(bus: Bus, times: int, start: int = 0) -> None:
    for i in range(start, start + times):
        bus.emit(AfterTrainIter(iter=i))


def hold(bus: Bus, held: Held, kind: str, **options: Any) -> Any:
    """Subscribe `held` with a blocking queue, and give it the event 0 it is busy with."""
    fn, offload = (held, "thread") if kind == "thread" else (held.in_a_task, None)
    subscription = bus.subscribe(fn, "after_train_iter", offload=offload, overflow="block", **options)
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    return subscription


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
@pytest.mark.parametrize("queue", [1, 3, 100])
def test_nothing_is_lost(bus: Bus, kind: str, queue: int) -> None:
    """However small the queue, every event is delivered, in order."""
    seen: list[Any] = []

    async def task(event: Event) -> None:
        seen.append(event)

    fn, offload = (seen.append, "thread") if kind == "thread" else (task, None)
    subscription = bus.subscribe(fn, "after_train_iter", offload=offload, queue=queue, overflow="block")
    emit(bus, 300)
    bus.flush(DEADLINE)

    assert [event.iter for event in seen] == list(range(300))
    assert subscription.stats.dropped == 0
    assert subscription.stats.peak_queued <= queue


@in_both_kinds
def test_full_queue_holds_the_emitting_thread(bus: Bus, held: Held, kind: str) -> None:
    """The delivery under way and the queue are `queue` events; the emit after that returns with the first end."""
    subscription = hold(bus, held, kind, queue=3)
    producer = Producer(lambda i: bus.emit(AfterTrainIter(iter=i)), range(1, 6))
    producer.start()
    assert producer.second.wait(DEADLINE)
    queued = subscription.account().queued
    held.let_go()
    producer.join(DEADLINE)
    bus.flush(DEADLINE)

    assert queued == 3
    assert producer.returned == [1, 2, 3, 4, 5]
    assert [event.iter for event in held.seen] == list(range(6))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["cancel", "close", "stall"])
def test_producer_is_let_go_when_the_subscriber_ends(held: Held, end: str) -> None:
    """A subscriber that is cancelled, closed or stalled holds nobody any longer."""
    bus = Bus()
    subscription = hold(bus, held, "thread", queue=1, stall_timeout=0.1 if end == "stall" else 60.0)
    producer = Producer(lambda i: bus.emit(AfterTrainIter(iter=i)), range(1, 4))
    producer.start()
    if end == "cancel":
        subscription.cancel()
    elif end == "close":
        bus.close(0.1)
    producer.join(DEADLINE)

    assert producer.returned == [1, 2, 3]
    bus.close(0.1)


def test_failed_subscriber_holds_nobody(bus: Bus) -> None:
    """One disabled by its error lets the producer go on."""

    def fails(event: Event) -> None:
        raise ValueError

    subscription = bus.subscribe(fails, "after_train_iter", offload="thread", overflow="block", queue=1)
    emit(bus, 50)
    bus.flush(DEADLINE)

    assert (subscription.stats.failed, subscription.stats.dropped) == (1, 49)


def test_event_the_filter_holds_back_does_not_wait(bus: Bus, held: Held) -> None:
    """Only an event that this subscriber wants may hold the producer for it."""
    hold(bus, held, "thread", queue=1, when=lambda event: event.iter % 10 == 0)

    emit(bus, 9, start=1)

    assert held.seen == []


def test_paused_subscriber_holds_nobody(bus: Bus, held: Held) -> None:
    """Events pass by a paused subscriber, its queue full or not."""
    subscription = hold(bus, held, "thread", queue=1)
    subscription.pause()

    emit(bus, 10, start=1)

    assert subscription.stats.queued == 1


def test_other_subscribers_hear_at_once(bus: Bus, held: Held) -> None:
    """A producer that waits for one subscriber has given the events before to all the others."""
    heard = threading.Event()
    bus.subscribe(lambda event: heard.set(), "after_train_iter", offload="thread")
    hold(bus, held, "thread", queue=1)

    assert heard.wait(DEADLINE)


@in_both_kinds
def test_subscriber_that_emits_its_own_event_does_not_wait_for_itself(bus: Bus, kind: str) -> None:
    """In the background nobody waits: there the queue may grow."""
    seen: list[int] = []

    def twice(event: AfterTrainIter) -> None:
        seen.append(event.iter)
        if event.iter:
            bus.emit(AfterTrainIter(iter=event.iter - 1))

    async def task(event: AfterTrainIter) -> None:
        twice(event)

    fn, offload = (twice, "thread") if kind == "thread" else (task, None)
    bus.subscribe(fn, "after_train_iter", offload=offload, overflow="block", queue=1)
    emit(bus, 1, start=5)
    for _ in range(6):
        bus.flush(DEADLINE)

    assert seen == [5, 4, 3, 2, 1, 0]


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
