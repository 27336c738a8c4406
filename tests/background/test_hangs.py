"""Background subscribers that hang: nobody waits for them longer than was agreed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Any

import anyio
import pytest

from eventloop.background.gil_scheduler import Pace
from eventloop.background.queues.failures import FailingQueue
from eventloop.background.queues.options import LaneOptions
from eventloop.background.queues.queue import Delivery
from eventloop.background.runners import ThreadLane
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, HandlerFailed
from tests.conftest import DEADLINE, Held

PROMPT = DEADLINE / 2
"""Seconds that mean somebody waited for the hung subscriber after all."""


def emit(bus: Bus, times: int, start: int = 0) -> None:
    for i in range(start, start + times):
        bus.emit(AfterTrainIter(iter=i))


async def sleeps_forever(event: AfterTrainIter) -> None:
    await anyio.sleep_forever()


def hang(bus: Bus, held: Held, how: str, **options: Any) -> Any:
    """Subscribe one that hangs, in one of three ways, and give it an event."""
    ways: dict[str, tuple[Callable[[Any], Any], str | None]] = {
        "thread": (held, "thread"),
        "task": (held.in_a_task, None),
        "blocking task": (held.on_the_loop, None),
    }
    fn, offload = ways[how]
    subscription = bus.subscribe(fn, "after_train_iter", offload=offload, name="hung", **options)
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    return subscription


in_three_ways = pytest.mark.parametrize("how", ["thread", "task", "blocking task"])


@in_three_ways
def test_close_returns_in_time_and_reports_what_is_left(
    held: Held, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A hung subscriber costs a close its timeout, and its events are in the report as left."""
    bus = Bus()
    subscription = hang(bus, held, how)
    emit(bus, 4, start=1)
    began = monotonic()

    report = bus.close(0.2)

    assert monotonic() - began < PROMPT
    assert not report.complete
    assert not bus.close(0.2).complete
    assert "events left undelivered: hung (" in caplog.text
    stats = subscription.stats
    assert stats.delivered + stats.failed + stats.dropped + stats.queued == 5
    assert stats.delivered == 0


@pytest.mark.slow
@in_three_ways
def test_flush_returns_in_time(bus: Bus, held: Held, how: str) -> None:
    """A flush that could not finish says so."""
    hang(bus, held, how)
    began = monotonic()

    report = bus.flush(0.1)

    assert monotonic() - began < PROMPT
    assert not report


@in_three_ways
def test_stalled_subscriber_is_reported_and_not_waited_for(bus: Bus, held: Held, how: str) -> None:
    """After `stall_timeout` seconds in one delivery a subscriber is given up: a failure, told as such."""
    mailed: list[HandlerFailed] = []
    bus.subscribe(mailed.append, "handler_failed")
    subscription = hang(bus, held, how, stall_timeout=0.05)
    emit(bus, 4, start=1)
    began = monotonic()

    bus.flush(DEADLINE if how != "blocking task" else 0.5)
    bus.poll()

    assert monotonic() - began < PROMPT
    assert [event.handler for event in mailed] == ["hung"]
    assert mailed[0].cost >= 0.05
    assert "spent more than stall_timeout=0.05 s on one delivery" in mailed[0].error
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


def test_stalled_delivery_that_returns_after_all_is_counted_once(bus: Bus, held: Held) -> None:
    """It failed when it stalled; its late end changes nothing but its time."""
    subscription = hang(bus, held, "thread", stall_timeout=0.05)
    bus.flush(DEADLINE)
    held.let_go()
    assert subscription.lane.closed.wait(DEADLINE)
    stats = subscription.stats

    assert (stats.calls, stats.failed, stats.delivered) == (1, 1, 0)
    assert stats.seconds >= 0.05


def test_a_stall_that_two_threads_see_is_reported_once(held: Held) -> None:
    """The loop and a thread that flushes both look for stalls; only the first to see one tells of it."""
    told: list[BaseException] = []

    def report(queue: FailingQueue, error: BaseException, item: Delivery | None, seconds: float) -> None:
        told.append(error)
        lane.check_stall(perf_counter() + 60)  # the other thread, before the first has given the lane up

    lane = ThreadLane("hung", held, LaneOptions(stall_timeout=0.05), report, Pace())
    lane.start()
    lane.incoming.append(AfterTrainIter(iter=0))
    lane.wake()
    assert held.entered.wait(DEADLINE)

    lane.check_stall(perf_counter() + 60)

    assert len(told) == 1
    assert (lane.account.failed, lane.ended_by) == (1, "stalled")


@pytest.mark.slow
def test_stalled_batch_fails_as_a_whole(bus: Bus, held: Held) -> None:
    """Every event of the batch under way is counted as failed, those that wait as dropped."""
    subscription = hang(bus, held, "thread", stall_timeout=0.3, batch=True)
    emit(bus, 4, start=1)
    bus.flush(DEADLINE)

    assert (subscription.stats.failed, subscription.stats.dropped) == (1, 4)


def test_close_tears_a_task_out_of_its_delivery(held: Held) -> None:
    """A coroutine that waits forever is cancelled at the deadline, and the loop's thread ends."""
    before = set(threading.enumerate())
    bus = Bus()
    bus.subscribe(sleeps_forever, "after_train_iter")
    emit(bus, 1)
    bus.stats()
    bus.close(0.1)
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE)

    assert set(threading.enumerate()) <= before


def test_cancelled_task_is_torn_out_of_its_delivery(bus: Bus) -> None:
    """Cancelling a subscription does not wait for a coroutine that never returns."""
    subscription = bus.subscribe(sleeps_forever, "after_train_iter")
    emit(bus, 1)
    bus.stats()
    lane = subscription.lane
    subscription.cancel()

    assert lane is not None
    assert lane.closed.wait(DEADLINE)
    assert subscription.stats.failed + subscription.stats.dropped == 1


def test_a_hung_subscriber_does_not_hold_up_emits(bus: Bus, held: Held) -> None:
    """Emitting goes on at once, and the account stays exact."""
    subscription = hang(bus, held, "thread", queue=10, overflow="drop_oldest")
    emit(bus, 5000, start=1)
    stats = subscription.stats

    assert stats.queued == 11
    assert stats.dropped == 5001 - 11
