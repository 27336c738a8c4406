"""Background subscribers: delivery, flush and close, and coming and going."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import AfterTrainIter, Event
from tests.conftest import DEADLINE, Held
from tests.support.spilling import emit, hold, in_both_kinds, iters, subscribe


@in_both_kinds
@pytest.mark.parametrize("end", ["flush", "close"])
def test_every_event_is_delivered_in_order(bus: Bus, kind: str, end: str) -> None:
    """A flush or close returns when all that was emitted is delivered, and reports the account."""
    seen: list[Any] = []
    subscribe(bus, kind, seen.append)
    emit(bus, 3000)

    report = getattr(bus, end)(DEADLINE)

    assert report.complete
    assert iters(seen) == list(range(3000))
    assert [(stats.delivered, stats.calls, stats.queued) for stats in report.stats] == [(3000, 3000, 0)]


def test_a_long_coroutine_keeps_the_order(bus: Bus) -> None:
    """A subscriber gets its next event when it is done with the last: its deliveries never overlap."""
    steps: list[str] = []

    async def slow(event: AfterTrainIter) -> None:
        steps.append(f"{event.iter} begins")
        for _ in range(3):
            await asyncio.sleep(0)
        steps.append(f"{event.iter} ends")

    bus.subscribe(slow, "after_train_iter")
    emit(bus, 3)
    bus.flush(DEADLINE)

    assert steps == [f"{i} {what}" for i in range(3) for what in ("begins", "ends")]


@in_both_kinds
def test_deliveries_and_callbacks_have_a_thread_of_their_own(bus: Bus, kind: str) -> None:
    """A task runs on the loop's thread, an offloaded function and its `on_flush` on the subscriber's."""
    names: list[str] = []
    note = lambda *_: names.append(threading.current_thread().name)
    subscribe(bus, kind, note, name="mine", on_flush=note)
    emit(bus, 2)
    bus.flush(DEADLINE)

    assert names == ["eventloop mine" if kind == "thread" else "eventloop coroutines"] * 3


def test_a_slow_subscriber_does_not_hold_up_another(bus: Bus, held: Held) -> None:
    """Each has a queue of its own, which is delivered without a flush."""
    bus.subscribe(held, "after_train_iter", offload="thread")
    bus.subscribe(held.in_a_task, "after_train_iter")
    done = threading.Event()
    bus.subscribe(lambda event: done.set(), "after_train_iter", offload="thread")

    emit(bus, 1)

    assert done.wait(DEADLINE)
    assert held.seen == []


def test_no_thread_is_started_without_a_background_subscriber() -> None:
    """A bus of sync handlers has no thread."""
    before = set(threading.enumerate())
    bus = Bus()
    bus.subscribe(lambda event: None, "*")
    emit(bus, 1)

    assert set(threading.enumerate()) <= before


def test_emitting_wakes_no_thread(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """No emit calls into the loop while the subscriber's queue has room: no wake-up per event."""
    calls: list[threading.Thread] = []
    call_soon = asyncio.BaseEventLoop.call_soon_threadsafe

    def counted(*arguments: Any, **more: Any) -> Any:
        calls.append(threading.current_thread())
        return call_soon(*arguments, **more)

    seen: list[Any] = []
    subscribe(bus, "loop", seen.append)
    for lap in range(10):
        with monkeypatch.context() as patch:
            patch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", counted)
            emit(bus, 100, start=100 * lap)
        bus.flush(DEADLINE)

    assert threading.current_thread() not in calls
    assert iters(seen) == list(range(1000))


@in_both_kinds
@pytest.mark.parametrize(("batch", "sizes"), [(True, [5]), (1, [1] * 5), (2, [2, 2, 1]), (9, [5])])
def test_batch_delivers_lists(bus: Bus, held: Held, kind: str, batch: bool | int, sizes: list[int]) -> None:
    """`batch=True` delivers all that waits as one list, `batch=n` lists of at most n events, in order."""
    subscription = hold(bus, held, kind, queue=9, batch=batch)
    emit(bus, 5, start=1)
    held.let_go()
    bus.flush(DEADLINE)

    assert [len(events) for events in held.seen] == [1, *sizes]
    assert [i for events in held.seen for i in iters(events)] == [*range(6)]
    assert (subscription.stats.calls, subscription.stats.delivered) == (1 + len(sizes), 6)


@in_both_kinds
def test_a_new_subscriber_does_not_hear_what_came_before(bus: Bus, kind: str) -> None:
    """Subscribing takes effect at the next emit, in the background as well."""
    subscribe(bus, kind, lambda event: None, name="first")
    emit(bus, 10)
    seen: list[Any] = []
    subscribe(bus, kind, seen.append, name="second")
    emit(bus, 1, start=10)
    bus.flush(DEADLINE)

    assert iters(seen) == [10]


@in_both_kinds
def test_pause_lets_events_pass_by(bus: Bus, kind: str) -> None:
    """Exactly the events emitted between `pause` and `resume` are left out, and of the account."""
    seen: list[Any] = []
    subscription = subscribe(bus, kind, seen.append)
    emit(bus, 3)
    subscription.pause()
    emit(bus, 3, start=3)
    subscription.resume()
    emit(bus, 3, start=6)
    bus.flush(DEADLINE)

    assert iters(seen) == [0, 1, 2, 6, 7, 8]
    assert subscription.stats.delivered == 6


def test_cancel_drops_what_waits_and_finishes_what_runs(bus: Bus, held: Held) -> None:
    """The delivery under way ends by itself; the queue is dropped, and counted."""
    subscription = hold(bus, held)
    emit(bus, 4, start=1)
    subscription.cancel()
    emit(bus, 4, start=5)
    subscriber = subscription.subscriber
    held.let_go()

    assert subscriber is not None
    assert subscriber.closed.wait(DEADLINE)
    assert iters(held.seen) == [0]
    stats = subscription.stats
    assert (stats.delivered, stats.dropped, stats.queued) == (1, 4, 0)
    assert not bus.wants(AfterTrainIter)


@in_both_kinds
def test_callbacks_come_after_the_events(bus: Bus, kind: str) -> None:
    """`on_flush` runs at each flush and at the close, `on_close` once at the end, however often the bus is closed."""
    steps: list[Any] = []
    flushed, closed = lambda: steps.append("flushed"), lambda: steps.append("closed")
    subscribe(bus, kind, lambda event: steps.append(event.iter), on_flush=flushed, on_close=closed)
    emit(bus, 2)
    bus.flush(DEADLINE)
    emit(bus, 1, start=2)

    assert bus.close(DEADLINE)
    assert bus.close(DEADLINE)
    assert [step for step in steps if step != "flushed"] == [0, 1, 2, "closed"]
    assert steps[2] == "flushed"


@pytest.mark.parametrize("what", ["flush", "close"])
@in_both_kinds
def test_waiting_for_the_background_in_the_background_is_refused(bus: Bus, kind: str, what: str) -> None:
    """A subscriber that flushes or closes its bus would wait for itself: an error says so."""
    errors: list[str] = []

    def wait(event: AfterTrainIter) -> None:
        try:
            getattr(bus, what)(DEADLINE)
        except RuntimeError as error:
            errors.append(str(error))

    subscribe(bus, kind, wait)
    emit(bus, 1)
    bus.flush(DEADLINE)

    assert errors == [f"bus.{what} was called by a background subscriber: it may wait for itself"]


@pytest.mark.parametrize("what", ["flush", "close", "reopen"])
@pytest.mark.parametrize("name", ["eventloop of my own", "eventloop background", "eventloop coroutines"])
def test_a_thread_of_the_program_may_wait_whatever_its_name(bus: Bus, what: str, name: str) -> None:
    """A subscriber is known by its thread, not by the name of the thread: another thread is not refused."""
    received: list[Event] = []
    subscribe(bus, "thread", received.append)
    emit(bus, 3)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            getattr(bus, what)()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()

    assert [str(error) for error in errors if "subscriber" in str(error)] == []
    assert what == "reopen" or len(received) == 3


def test_subscriber_may_read_the_account(bus: Bus) -> None:
    """`stats` in a subscriber does not wait for itself."""
    queued: list[int] = []
    bus.subscribe(lambda event: queued.append(bus.stats()[0].queued), "after_train_iter", offload="thread")

    emit(bus, 1)
    bus.flush(DEADLINE)

    assert queued == [1]


def act_in_a_delivery(bus: Bus, kind: str, act: Callable[[Subscription], object]) -> Subscription:
    """Subscribe one that acts on its first event, when nine more have been emitted."""
    entered, emitted, done = threading.Event(), threading.Event(), threading.Event()

    def fn(event: AfterTrainIter) -> None:
        if not entered.is_set():
            entered.set()
            assert emitted.wait(DEADLINE)
            act(subscription)
            done.set()

    subscription = subscribe(bus, kind, fn)
    emit(bus, 1)
    assert entered.wait(DEADLINE)
    emit(bus, 9, start=1)
    emitted.set()
    assert done.wait(DEADLINE)
    return subscription


@in_both_kinds
@pytest.mark.parametrize(("what", "account"), [("cancel", (1, 9)), ("pause", (10, 0))])
def test_a_subscriber_that_ends_itself_has_had_what_came_before(
    bus: Bus, kind: str, what: str, account: tuple[int, int]
) -> None:
    """What was emitted before its handler cancels, or pauses, is in its account."""
    subscription = act_in_a_delivery(bus, kind, lambda subscription: getattr(subscription, what)())
    emit(bus, 5, start=10)
    bus.flush(DEADLINE)

    assert (subscription.stats.delivered, subscription.stats.dropped) == account
