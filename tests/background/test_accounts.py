"""Accounts of background subscribers, against counts that the test keeps itself."""

from __future__ import annotations

import threading
from time import sleep

import pytest

from eventloop.background.queues.options import Overflow
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, Event
from tests.conftest import DEADLINE, Held
from tests.support.internals import substitute
from tests.support.process_support import until
from tests.support.spilling import total


class Emitter:
    """Emits iterations, and counts them before and after each."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.begun = self.ended = 0

    def emit(self, count: int) -> None:
        for _ in range(count):
            self.begun += 1
            self.bus.emit(AfterTrainIter(iter=self.begun - 1))
            self.ended += 1


def test_every_look_is_exact_while_events_come(bus: Bus) -> None:
    """In 1,000 looks at ten subscribers in a burst each account has exactly the events emitted by then."""
    every = [1] * 9 + [7]
    for number, n in enumerate(every):
        bus.subscribe(lambda event: None, AfterTrainIter, offload="thread", every=n, name=f"s{number}")
    emitter = Emitter(bus)
    training = threading.Thread(target=emitter.emit, args=(50_000,))
    training.start()
    wrong = 0
    for _ in range(1000):
        least = emitter.ended
        totals = [total(stats) for stats in bus.stats()]
        most = emitter.begun
        wrong += sum(not least // n <= came <= most // n for came, n in zip(totals, every, strict=True))
    training.join()

    assert wrong == 0
    assert bus.flush(DEADLINE).ok


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("overflow", "seconds"),
    [("spill", 0.0), ("spill", 0.1), ("drop_oldest", 0.02), ("drop_newest", 0.1), ("latest", 0.02)],
)
def test_a_close_that_ran_out_of_time_is_exact(overflow: Overflow, seconds: float) -> None:
    """Whatever was delivered by the deadline, the account has every event, also one with `every=`."""
    bus = Bus()
    subscriptions = [
        bus.subscribe(
            lambda event: sleep(0.001),
            AfterTrainIter,
            offload="thread",
            every=n,
            overflow=overflow,
            name=str(n),
        )
        for n in (1, 7)
    ]
    Emitter(bus).emit(5000)
    bus.close(seconds)

    assert [total(each.stats) for each in subscriptions] == [5000, 5000 // 7]


def test_events_that_fail_are_in_the_account(bus: Bus) -> None:
    """A failure in the middle of a run of short deliveries costs its event, and no other."""

    def fails(event: AfterTrainIter) -> None:
        if event.iter % 10 == 3:
            raise ValueError("no")

    subscription = bus.subscribe(fails, AfterTrainIter, offload="thread", on_error="log")
    Emitter(bus).emit(1000)
    bus.flush(DEADLINE)

    assert (subscription.stats.delivered, subscription.stats.failed) == (900, 100)


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_the_end_of_a_subscriber_is_exact(how: str) -> None:
    """What it had not got when it was cancelled, or failed, is dropped; each event is counted once."""
    bus = Bus()
    counted = 0

    def count(event: AfterTrainIter) -> None:
        nonlocal counted
        counted += 1
        if how == "fail" and event.iter == 700:
            raise ValueError("no")

    subscription = bus.subscribe(count, AfterTrainIter, offload="thread")
    emitter = Emitter(bus)
    training = threading.Thread(target=emitter.emit, args=(20_000,))
    training.start()
    until(lambda: counted > 100)
    if how == "cancel":
        subscription.cancel()
    training.join()
    bus.close(DEADLINE)
    stats = subscription.stats

    assert stats.delivered + stats.failed == counted
    assert total(stats) == 20_000 if how == "fail" else total(stats) <= 20_000
    assert stats.queued == 0


def test_accounts_do_not_wait_for_a_coroutine_that_blocks(bus: Bus, held: Held) -> None:
    """A coroutine that never awaits holds its loop; threads deliver, and `stats` returns."""
    bus.on(AfterTrainIter)(held.on_the_loop)
    seen: list[Event] = []
    bus.subscribe(seen.append, AfterTrainIter, offload="thread", name="free")
    Emitter(bus).emit(3)
    assert held.entered.wait(DEADLINE)
    until(lambda: len(seen) == 3)

    assert [total(stats) for stats in bus.stats()] == [3, 3]


def test_events_beyond_the_limit_of_the_list_are_counted(
    bus: Bus, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest are dropped while nothing takes them, because memory is bounded."""
    substitute(monkeypatch, "inbox.INCOMING_LIMIT", 1000)

    def hold(event: Event) -> bool:
        held(event)
        return True

    subscription = bus.subscribe(held, AfterTrainIter, offload="thread", when=hold, overflow="drop_oldest")
    Emitter(bus).emit(1)
    assert held.entered.wait(DEADLINE)
    Emitter(bus).emit(30_000)
    bus.signal(AfterTrainIter)
    stats = subscription.stats
    held.let_go()

    assert total(stats) == 30_001
    assert stats.dropped > 10_000


@pytest.mark.parametrize("overflow", ["spill", "block", "drop_newest"])
def test_when_is_asked_once_for_each_event(bus: Bus, overflow: Overflow) -> None:
    """In the order of the emits; what it rejects leaves the account."""
    asked: list[int] = []

    def odd(event: AfterTrainIter) -> bool:
        asked.append(event.iter)
        return event.iter % 2 == 1

    seen: list[int] = []
    subscription = bus.subscribe(
        lambda event: seen.append(event.iter),
        AfterTrainIter,
        offload="thread",
        when=odd,
        overflow=overflow,
        queue=4096,
    )
    Emitter(bus).emit(1000)
    bus.flush(DEADLINE)

    assert asked == list(range(1000))
    assert seen == list(range(1, 1000, 2))
    assert total(subscription.stats) == 500
