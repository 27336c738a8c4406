"""Background subscribers: delivery, draining, and coming and going."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import AfterTrainIter, BeforeTrainIter, Event, StopRequested
from tests.conftest import DEADLINE, Held
from tests.support.spilling import hold

in_both_kinds = pytest.mark.parametrize("kind", ["loop", "thread"])


def emit(bus: Bus, times: int, start: int = 0) -> None:
    for i in range(start, start + times):
        bus.emit(AfterTrainIter(iter=i))


def iters(events: list[Any]) -> list[int]:
    return [event.iter for event in events]


def record(
    bus: Bus, kind: str, *events: str, seen: list[Any] | None = None, **options: Any
) -> tuple[list[Any], Subscription]:
    """Subscribe a recorder, as a task or on a thread."""
    seen = [] if seen is None else seen

    async def task(event: Any) -> None:
        seen.append(event)

    if kind == "thread":
        return seen, bus.subscribe(
            seen.append, *(events or ["after_train_iter"]), offload="thread", **options
        )
    return seen, bus.subscribe(task, *(events or ["after_train_iter"]), **options)


@in_both_kinds
def test_every_event_is_delivered_in_order(bus: Bus, kind: str) -> None:
    """A flush returns when all that was emitted has been delivered, in the order of the emits."""
    seen, subscription = record(bus, kind)
    emit(bus, 1000)

    assert bus.flush(DEADLINE)
    assert iters(seen) == list(range(1000))
    assert subscription.stats.delivered == subscription.stats.calls == 1000


def test_a_long_coroutine_keeps_the_order(bus: Bus) -> None:
    """A subscriber is given its next event when it is done with the last: its events never overlap."""
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


def test_subscribers_do_not_run_on_the_emitting_thread(bus: Bus) -> None:
    """A task runs on the loop's thread, an offloaded function on one of its own."""
    names: list[str] = []

    async def task(event: Event) -> None:
        names.append(threading.current_thread().name)

    def function(event: Event) -> None:
        names.append(threading.current_thread().name)

    bus.subscribe(task, "after_train_iter")
    bus.subscribe(function, "after_train_iter", offload="thread")
    emit(bus, 1)
    bus.flush(DEADLINE)

    assert sorted(names) == ["eventloop coroutines", f"eventloop {bus.stats()[1].name}"]


def test_a_slow_subscriber_does_not_hold_up_another(bus: Bus, held: Held) -> None:
    """Each has a queue of its own."""
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


def test_an_event_is_delivered_without_anyone_asking(bus: Bus) -> None:
    """The loop looks into the inbox by itself."""
    delivered = threading.Event()
    bus.subscribe(lambda event: delivered.set(), "after_train_iter", offload="thread")

    emit(bus, 1)

    assert delivered.wait(DEADLINE)


def test_emitting_wakes_no_thread(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 emits make no call into the loop while the inbox is small: no wake-up per event."""
    calls: list[threading.Thread] = []
    call_soon = asyncio.BaseEventLoop.call_soon_threadsafe

    def counted(*arguments: Any, **more: Any) -> Any:
        calls.append(threading.current_thread())
        return call_soon(*arguments, **more)

    seen, _ = record(bus, "loop")
    for lap in range(10):
        with monkeypatch.context() as patch:
            patch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", counted)
            emit(bus, 100, start=100 * lap)
        bus.flush(DEADLINE)

    assert threading.current_thread() not in calls
    assert iters(seen) == list(range(1000))


@in_both_kinds
def test_batch_delivers_lists(bus: Bus, held: Held, kind: str) -> None:
    """`batch=True` delivers all that is waiting as one list."""
    subscription = hold(bus, held, kind, queue=9, batch=True)
    emit(bus, 5, start=1)
    bus.stats()  # routes them
    held.let_go()
    bus.flush(DEADLINE)

    assert [iters(batch) for batch in held.seen] == [[0], [1, 2, 3, 4, 5]]
    assert (subscription.stats.calls, subscription.stats.delivered) == (2, 6)


@in_both_kinds
@pytest.mark.parametrize(("most", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (9, [5])])
def test_a_number_is_the_most_a_batch_has(
    bus: Bus, held: Held, kind: str, most: int, sizes: list[int]
) -> None:
    """`batch=n` delivers lists of at most n events, in order."""
    subscription = hold(bus, held, kind, queue=9, batch=most)
    emit(bus, 5, start=1)
    bus.stats()  # routes them
    held.let_go()
    bus.flush(DEADLINE)

    assert [len(batch) for batch in held.seen] == [1, *sizes]
    assert [i for batch in held.seen for i in iters(batch)] == [*range(6)]
    assert subscription.stats.delivered == 6


def test_a_filter_is_asked_in_the_order_of_the_events(bus: Bus) -> None:
    """Events that are routed together reach their subscribers in the order of their emits, with a filter or without."""
    asked, seen, plain = list[int](), list[int](), list[int]()

    def even(event: Any) -> bool:
        asked.append(event.iter)
        return bool(event.iter % 2 == 0)

    def note(event: Any) -> None:
        seen.append(event.iter)

    bus.subscribe(note, "before_train_iter", "after_train_iter", offload="thread", when=even)
    bus.subscribe(lambda event: plain.append(event.iter), "*", offload="thread", name="plain")
    for i in range(200):
        bus.emit(BeforeTrainIter(iter=i))
        bus.emit(AfterTrainIter(iter=i))
    bus.flush(DEADLINE)

    both = [i for i in range(200) for _ in range(2)]
    assert asked == plain == both
    assert seen == [i for i in both if i % 2 == 0]


@in_both_kinds
def test_a_new_subscriber_does_not_hear_what_came_before(bus: Bus, kind: str) -> None:
    """Subscribing takes effect at the next emit, in the background as well."""
    record(bus, kind, name="first")
    emit(bus, 10)
    seen, _ = record(bus, kind, name="second")
    emit(bus, 1, start=10)
    bus.flush(DEADLINE)

    assert iters(seen) == [10]


@in_both_kinds
def test_pause_lets_events_pass_by(bus: Bus, kind: str) -> None:
    """Exactly the events emitted between `pause` and `resume` are left out, and of the account."""
    seen, subscription = record(bus, kind)
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
    subscription = bus.subscribe(held, "after_train_iter", offload="thread")
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    emit(bus, 4, start=1)
    subscription.cancel()
    emit(bus, 4, start=5)
    lane = subscription.lane
    held.let_go()

    assert lane is not None
    assert lane.closed.wait(DEADLINE)
    assert iters(held.seen) == [0]
    stats = subscription.stats
    assert (stats.delivered, stats.dropped, stats.queued) == (1, 4, 0)
    assert not bus.wants(AfterTrainIter)


def test_flush_calls_on_flush_after_the_events(bus: Bus) -> None:
    """`on_flush` runs on the subscriber's own thread, behind what was emitted before."""
    steps: list[Any] = []
    record(bus, "thread", seen=steps, on_flush=lambda: steps.append(threading.current_thread().name))
    emit(bus, 2)
    bus.flush(DEADLINE)

    assert steps == [AfterTrainIter(iter=0), AfterTrainIter(iter=1), f"eventloop {bus.stats()[0].name}"]


@in_both_kinds
def test_close_calls_on_close_once_after_the_events(bus: Bus, kind: str) -> None:
    """`on_close` runs once, behind the last event, however often the bus is closed."""
    steps: list[Any] = []
    record(bus, kind, seen=steps, on_close=lambda: steps.append("closed"))
    emit(bus, 2)

    assert bus.close(DEADLINE)
    assert bus.close(DEADLINE)
    assert steps == [AfterTrainIter(iter=0), AfterTrainIter(iter=1), "closed"]


@in_both_kinds
def test_close_delivers_everything_and_reports_it(kind: str) -> None:
    """The report of a close is the account of each subscriber."""
    bus = Bus()
    seen, _ = record(bus, kind, queue=5000)
    emit(bus, 3000)

    report = bus.close(DEADLINE)

    assert report.complete
    assert len(seen) == 3000
    assert [(record.delivered, record.queued) for record in report.stats] == [(3000, 0)]


def test_close_ends_the_threads() -> None:
    """Nothing of a closed bus goes on running."""
    before = set(threading.enumerate())
    bus = Bus()
    record(bus, "loop")
    _, subscription = record(bus, "thread", name="own thread")
    bus.close(DEADLINE)
    join(set(threading.enumerate()) - before)

    assert set(threading.enumerate()) <= before
    assert not subscription.stats.failed


def join(threads: Iterable[threading.Thread]) -> None:
    for thread in threads:
        thread.join(DEADLINE)


def test_closed_bus_hands_nothing_to_the_background() -> None:
    """After the close an emit reaches sync handlers alone, and nothing piles up, whoever subscribes next."""
    bus = Bus()
    seen, _ = record(bus, "thread")
    bus.close(DEADLINE)
    bus.subscribe(lambda event: None, "after_val")
    assert not bus.wants(AfterTrainIter)

    emit(bus, 10)

    assert seen == []
    assert bus.stats()[0].queued == 0


@pytest.mark.parametrize("what", ["flush", "close"])
@in_both_kinds
def test_waiting_for_the_background_in_the_background_is_refused(bus: Bus, kind: str, what: str) -> None:
    """A subscriber that flushes or closes its bus would wait for itself: an error says so."""
    errors: list[str] = []

    def wait(event: Event) -> None:
        try:
            getattr(bus, what)(DEADLINE)
        except RuntimeError as error:
            errors.append(str(error))

    async def task(event: Event) -> None:
        wait(event)

    bus.subscribe(
        task if kind == "loop" else wait, "after_train_iter", offload=None if kind == "loop" else kind
    )
    emit(bus, 1)
    bus.flush(DEADLINE)

    assert errors == [f"bus.{what} was called by a background subscriber, which would wait for itself"]


@in_both_kinds
def test_subscriber_may_emit(bus: Bus, kind: str) -> None:
    """An event emitted in the background reaches its subscribers there."""
    done = threading.Event()

    def answer(event: Event) -> None:
        bus.emit(StopRequested(reason="answer"))

    async def task(event: Event) -> None:
        answer(event)

    bus.subscribe(
        task if kind == "loop" else answer, "after_train_iter", offload=None if kind == "loop" else kind
    )
    bus.subscribe(lambda event: done.set(), "stop_requested", offload="thread")
    emit(bus, 1)

    assert done.wait(DEADLINE)


def test_subscriber_may_read_the_account(bus: Bus) -> None:
    """`stats` in a subscriber does not wait for itself."""
    queued: list[int] = []
    bus.subscribe(lambda event: queued.append(bus.stats()[0].queued), "after_train_iter", offload="thread")

    emit(bus, 1)
    bus.flush(DEADLINE)

    assert queued == [1]


def act_in_a_delivery(bus: Bus, kind: str, act: Callable[[Subscription], object]) -> Subscription:
    """A subscriber that acts on its first event, when nine more have been emitted."""
    entered, emitted, done = threading.Event(), threading.Event(), threading.Event()

    def fn(event: AfterTrainIter) -> None:
        if not entered.is_set():
            entered.set()
            assert emitted.wait(DEADLINE)
            act(subscription)
            done.set()

    async def task(event: AfterTrainIter) -> None:
        fn(event)

    threaded = kind == "thread"
    subscription = bus.subscribe(
        fn if threaded else task, "after_train_iter", offload="thread" if threaded else None
    )
    emit(bus, 1)
    assert entered.wait(DEADLINE)
    emit(bus, 9, start=1)
    emitted.set()
    assert done.wait(DEADLINE)
    return subscription


@pytest.mark.parametrize("kind", ["loop", "thread"])
@pytest.mark.parametrize("what", ["cancel", "pause"])
def test_a_subscriber_that_ends_itself_has_had_what_came_before(bus: Bus, kind: str, what: str) -> None:
    """What was emitted before its handler cancels, or pauses, is in its account, routed or not."""
    subscription = act_in_a_delivery(bus, kind, lambda subscription: getattr(subscription, what)())
    emit(bus, 5, start=10)
    bus.flush(DEADLINE)

    stats = subscription.stats
    assert (stats.delivered, stats.dropped) == ((1, 9) if what == "cancel" else (10, 0))


@pytest.mark.parametrize("kind", ["loop", "thread"])
def test_who_is_subscribed_by_a_subscriber_does_not_hear_what_came_before(bus: Bus, kind: str) -> None:
    """Who comes in the middle of a delivery hears what is emitted from then on."""
    late: list[Any] = []

    act_in_a_delivery(
        bus, kind, lambda subscription: bus.subscribe(late.append, "after_train_iter", offload="thread")
    )
    emit(bus, 2, start=10)
    bus.flush(DEADLINE)

    assert iters(late) == [10, 11]
