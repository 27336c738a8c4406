"""Background subscribers that hang: a flush or close waits for them as long as was agreed, and once."""

from __future__ import annotations

import re
import threading
from functools import partial
from time import monotonic
from typing import Any

import anyio
import pytest

from eventloop.background.queues.awaited import waited
from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import AfterTrainIter, Event, HandlerFailed
from tests.conftest import DEADLINE, Held
from tests.support import process_handlers as handlers
from tests.support.internals import drain_after, substitute
from tests.support.process_support import Start, until, waits_long
from tests.support.spilling import PROMPT, emit, total

pytest_plugins = ["tests.support.process_fixtures"]

in_three_ways = pytest.mark.parametrize("how", ["thread", "task", "blocking task"])


@pytest.fixture
def stuck_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a delivery stuck when a flush has waited for it for a moment."""
    substitute(monkeypatch, "awaited.STUCK_SECONDS", 0.05)


async def sleeps_forever(event: AfterTrainIter) -> None:
    await anyio.sleep_forever()


def hang(bus: Bus, held: Held, how: str, **options: Any) -> Subscription:
    """Subscribe one that hangs, in one of three ways, and give it an event."""
    ways: dict[str, Any] = {"thread": held, "task": held.in_a_task, "blocking task": held.on_the_loop}
    offload = "thread" if how == "thread" else None
    subscription = bus.subscribe(ways[how], "after_train_iter", offload=offload, name="hung", **options)
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    return subscription


@pytest.mark.representative(1)
@in_three_ways
def test_close_returns_in_time_and_reports_what_is_left(
    held: Held, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A hung subscriber costs a flush and a close their timeouts, and its events are in the report as left."""
    bus = Bus()
    subscription = hang(bus, held, how)
    emit(bus, 4, start=1)
    began = monotonic()
    assert not bus.flush(0.05)

    report = bus.close(0.1)

    assert monotonic() - began < PROMPT
    assert not report.complete
    assert not bus.close(0.1).complete
    assert "events left undelivered: hung (" in caplog.text
    assert (total(subscription.stats), subscription.stats.delivered) == (5, 0)


@in_three_ways
def test_stalled_subscriber_is_reported_and_not_waited_for(bus: Bus, held: Held, how: str) -> None:
    """After `stall_timeout` seconds in one delivery a subscriber is given up: a failure, reported as such."""
    told: list[HandlerFailed] = []
    bus.subscribe(told.append, "handler_failed")
    subscription = hang(bus, held, how, stall_timeout=0.05)
    emit(bus, 4, start=1)
    began = monotonic()

    bus.flush(DEADLINE if how != "blocking task" else 0.5)
    bus.poll()

    assert monotonic() - began < PROMPT
    assert [event.handler for event in told] == ["hung"]
    assert told[0].cost >= 0.05
    assert "spent more than stall_timeout=0.05 s on one delivery" in told[0].error
    account = subscription.account()  # not `stats`, which waits for a held loop once more
    assert account.failed == 1
    assert account.error.startswith("[stalled]")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["thread", "task"])
def test_close_does_not_wait_for_a_stalled_subscriber(held: Held, how: str) -> None:
    """One that stalls while the bus is being closed is given up, too, and the others are delivered to."""
    bus = Bus()
    seen: list[AfterTrainIter] = []
    bus.subscribe(seen.append, "after_train_iter", offload="thread")
    subscription = hang(bus, held, how, stall_timeout=0.1)
    emit(bus, 4, start=1)
    began = monotonic()

    bus.close(DEADLINE)

    assert monotonic() - began < PROMPT
    assert len(seen) == 5
    stats = subscription.stats
    assert (stats.failed, stats.dropped, stats.queued) == (1, 4, 0)


@pytest.mark.parametrize("batch", [False, True])
def test_stalled_delivery_that_returns_after_all_is_counted_once(bus: Bus, held: Held, batch: bool) -> None:
    """It failed when it stalled; its late end changes nothing but its time."""
    subscription = hang(bus, held, "thread", stall_timeout=0.05, batch=batch)
    emit(bus, 4, start=1)
    bus.flush(DEADLINE)
    held.let_go()
    assert subscription.subscriber is not None
    assert subscription.subscriber.closed.wait(DEADLINE)
    stats = subscription.stats

    assert (stats.calls, stats.failed, stats.delivered, stats.dropped) == (1, 1, 0, 4)
    assert stats.seconds >= 0.05


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_task_is_torn_out_of_its_delivery(no_thread_left: None, end: str) -> None:
    """A coroutine that waits forever is cancelled with its subscription, and by a close, which ends the loop."""
    bus = Bus(drain_timeout=0.1)
    subscription = bus.subscribe(sleeps_forever, "after_train_iter")
    assert subscription.subscriber is not None
    emit(bus, 1)
    bus.stats()
    if end == "cancel":
        subscription.cancel()
        assert subscription.subscriber.closed.wait(DEADLINE)
        assert subscription.stats.failed + subscription.stats.dropped == 1
    bus.close()


# --- one that is stuck is waited for once ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("stuck_at_once")
@in_three_ways
def test_a_close_does_not_wait_again(held: Held, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """It gives the hung one a moment; the others are delivered to, and closed, and the log says which is stuck."""
    bus = Bus()
    seen: list[Event] = []
    closed: list[str] = []
    bus.subscribe(seen.append, "after_train_iter", offload="thread", on_close=lambda: closed.append("fine"))
    bus.subscribe(seen.append, "*", offload="thread", on_close=lambda: closed.append("listening"), name="all")
    subscription = hang(bus, held, how, stall_timeout=10 * DEADLINE)
    assert not bus.flush(0.1)
    waits_long(subscription)
    emit(bus, 4, start=1)
    began = monotonic()

    report = bus.close(DEADLINE)

    assert monotonic() - began < PROMPT
    assert not report.complete
    assert (len(seen), closed) == (10, ["fine", "listening"])
    assert subscription.account().delivered == 0
    assert "events left undelivered: hung (" in caplog.text


def test_a_stuck_delivery_is_reported(
    held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The account, the report and the log say since when, once a flush has waited for it in vain, and not for a moment."""
    bus = Bus()
    subscription = hang(bus, held, "thread")
    emit(bus, 1)
    substitute(monkeypatch, "awaited.STUCK_SECONDS", DEADLINE)
    bus.flush(0.01)
    assert subscription.stats.error == ""
    substitute(monkeypatch, "awaited.STUCK_SECONDS", 0.05)
    flushed = bus.flush(0.1)
    closed = bus.close(0.1)

    (stats,) = flushed.stats
    assert re.fullmatch(r"stuck for \d+\.\d s in one delivery", stats.error)
    assert f"hung: 0 dropped, 0 failed, 2 left - {stats.error}" in str(flushed)
    assert closed.stats[0].error.startswith("[closed] stuck for ")
    assert "events left undelivered: hung (2), stuck for " in caplog.text
    held.let_go()
    until(lambda: subscription.account().delivered)
    assert subscription.account().error.startswith("[closed] in one delivery for ")  # when the bus closed


@pytest.mark.usefixtures("stuck_at_once")
@pytest.mark.parametrize(
    ("waits_for", "text"), [("a server", ", waiting for a server"), ("", ""), (print, "")]
)
def test_a_stuck_method_says_what_it_waits_for(
    waits_for: object, text: str, bus: Bus, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the text `waits_for` of the method's object."""
    drain_after(monkeypatch, held.entered.is_set)
    waiting = Waiting(waits_for, held)
    subscription = bus.subscribe(waiting.wait, "after_train_iter", offload="thread")
    emit(bus, 1)

    assert not bus.flush(0.1)

    assert subscription.stats.error.endswith(f" s in one delivery{text}")
    held.let_go()


class Waiting:
    """An object whose method hangs."""

    def __init__(self, waits_for: object, held: Held) -> None:
        self.waits_for = waits_for
        self.held = held

    def wait(self, event: Event) -> None:
        self.held(event)


@pytest.mark.slow
@pytest.mark.usefixtures("stuck_at_once")
def test_a_stuck_worker_process_is_reported(bus: Bus, start: Start) -> None:
    """A delivery in a process is one like any other."""
    far = start(handlers.hang_at_two)
    emit(bus, 5)
    until(lambda: far.account().delivered == 2)
    assert not bus.flush(0.1)
    assert far.stats.error.endswith(" s in one delivery")
    waits_long(far)
    began = monotonic()

    assert not bus.close(DEADLINE).complete
    assert monotonic() - began < PROMPT


def test_the_next_delivery_is_waited_for(bus: Bus) -> None:
    """Only the delivery that was waited for in vain is not waited for again: a subscriber that goes on has all the time."""
    gates, entered = ([threading.Event(), threading.Event()] for _ in range(2))

    def slow(event: AfterTrainIter) -> None:
        entered[event.iter].set()
        gates[event.iter].wait(DEADLINE)

    subscription = bus.subscribe(slow, "after_train_iter", offload="thread")
    assert subscription.subscriber is not None
    emit(bus, 2)
    assert entered[0].wait(DEADLINE)
    bus.flush(0.05)
    assert waited(subscription.subscriber) > 0
    gates[0].set()
    assert entered[1].wait(DEADLINE)
    assert waited(subscription.subscriber) == 0.0
    closer = threading.Timer(0.0, bus.close, [DEADLINE])
    closer.start()
    gates[1].set()
    closer.join()

    assert subscription.stats.delivered == 2


@pytest.mark.slow
def test_the_others_are_closed_beside_one_that_hangs(held: Held) -> None:
    """A close keeps a part of its time for those that have nothing left, and for those that hear of failures."""
    bus = Bus()
    closed: list[str] = []
    hang(bus, held, "thread")
    for name, events in (("other", "after_train_iter"), ("all", "*")):
        ends = partial(closed.append, name)
        bus.subscribe(lambda event: None, events, offload="thread", name=name, on_close=ends)
    emit(bus, 3)
    report = bus.close(1.0)

    assert not report.complete
    assert closed == ["other", "all"]
    assert [stats.error for stats in report.stats][1:] == ["", ""]
