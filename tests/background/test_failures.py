"""Background subscribers that raise: what happens to them, and who is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import AfterTrainIter, AfterVal, Event, HandlerFailed
from tests.conftest import DEADLINE, Held

in_both_kinds = pytest.mark.parametrize("kind", ["loop", "thread"])


def emit(bus: Bus, times: int) -> None:
    for i in range(times):
        bus.emit(AfterTrainIter(iter=i))


def subscribe(bus: Bus, kind: str, fn: Callable[[Any], object], *events: str, **options: Any) -> Subscription:
    """Subscribe a plain function, as a task or on a thread."""

    async def task(event: Any) -> None:
        fn(event)

    if kind == "thread":
        return bus.subscribe(fn, *(events or ["after_train_iter"]), offload="thread", **options)
    return bus.subscribe(task, *(events or ["after_train_iter"]), **options)


def odd_fails(event: AfterTrainIter) -> None:
    if event.iter % 2:
        raise ValueError(f"no {event.iter}")


def exits(event: Event) -> None:
    raise SystemExit(3)


@in_both_kinds
def test_disable_stops_delivering_after_the_first_error(
    bus: Bus, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By default a failed subscriber is logged once with its traceback and hears no more."""
    subscription = subscribe(bus, kind, odd_fails)
    emit(bus, 10)
    bus.flush(DEADLINE)
    stats = subscription.stats

    assert (stats.calls, stats.delivered, stats.failed, stats.dropped, stats.queued) == (2, 1, 1, 8, 0)
    assert stats.error == "[error] ValueError: no 1"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "and is disabled" in caplog.text
    assert "in odd_fails" in caplog.text


@in_both_kinds
def test_an_error_without_a_text_is_its_type(bus: Bus, kind: str) -> None:
    """As of a wait that took too long; no colon stands before nothing."""

    def times_out(event: Event) -> None:
        raise TimeoutError

    subscription = subscribe(bus, kind, times_out)
    emit(bus, 1)
    bus.flush(DEADLINE)

    assert subscription.stats.error == "[error] TimeoutError"


@in_both_kinds
def test_log_goes_on(bus: Bus, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """With "log" every event is delivered; the 1st, 2nd, 4th, 8th ... error is logged."""
    subscription = subscribe(bus, kind, odd_fails, on_error="log", queue=100)
    emit(bus, 20)
    bus.flush(DEADLINE)
    stats = subscription.stats

    assert (stats.calls, stats.delivered, stats.failed, stats.dropped) == (20, 10, 10, 0)
    assert stats.error == "ValueError: no 19"
    assert [record.getMessage().split("failed ")[-1] for record in caplog.records] == [
        f"({n} failures so far)" for n in (1, 2, 4, 8)
    ]


@in_both_kinds
def test_raise_raises_at_the_next_poll(bus: Bus, kind: str) -> None:
    """With "raise" the training thread gets each error, with its own traceback, at its next boundary."""
    subscribe(bus, kind, odd_fails, on_error="raise")
    emit(bus, 4)
    bus.flush(DEADLINE)

    for message in ("no 1", "no 3"):
        with pytest.raises(ValueError, match=message) as caught:
            bus.poll()
        assert caught.traceback[-1].name == "odd_fails"
    bus.poll()


@in_both_kinds
def test_raise_raises_at_the_close(kind: str) -> None:
    """An error nobody polled for is raised when the bus is closed, after everything was delivered."""
    bus = Bus()
    subscription = subscribe(bus, kind, odd_fails, on_error="raise")
    emit(bus, 3)

    with pytest.raises(ValueError, match="no 1"):
        bus.close(DEADLINE)

    assert subscription.stats.delivered == 2


@pytest.mark.parametrize(("kind", "where"), [("loop", "loop"), ("thread", "thread")])
def test_raise_says_whose_error_it_is(bus: Bus, kind: str, where: str) -> None:
    """A note names the subscriber, the event and its counters, as that of a synchronous handler does."""
    subscribe(bus, kind, odd_fails, on_error="raise", name="picky")
    emit(bus, 2)
    bus.flush(DEADLINE)

    with pytest.raises(ValueError, match="no 1") as caught:
        bus.poll()
    assert caught.value.__notes__ == [
        f"raised by background subscriber picky ({where}) on {AfterTrainIter(iter=1)!r}"
    ]


def test_raise_at_the_close_says_whose_error_it_is(held: Held) -> None:
    """Of a batch the note has the first event, and their number."""

    def fails(events: list[Event]) -> None:
        held(events)
        raise ValueError("no batch")

    bus = Bus()
    bus.subscribe(fails, "after_train_iter", offload="thread", on_error="raise", batch=True, name="picky")
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    emit(bus, 3)
    bus.stats()
    held.let_go()

    notes = []
    for _ in range(2):
        with pytest.raises(ValueError, match="no batch") as caught:
            bus.close(DEADLINE)
        notes += caught.value.__notes__
    first = f"raised by background subscriber picky (thread) on {AfterTrainIter(iter=0)!r}"
    assert notes == [first, f"{first}, the first of a batch of 3"]


@pytest.mark.parametrize("what", ["on_flush", "on_close"])
def test_raise_says_in_which_callback_an_error_is(what: str) -> None:
    """An error that is no event's has the callback in its note."""

    def fails() -> None:
        raise OSError("disk full")

    bus = Bus()
    subscribe(bus, "thread", lambda event: None, on_error="raise", name="picky", **{what: fails})
    bus.flush(DEADLINE)

    with pytest.raises(OSError, match="disk full") as caught:
        bus.close(DEADLINE)
    assert caught.value.__notes__ == [f"raised by background subscriber picky (thread) in {what}"]


def fails_inside_and_in_the_background() -> None:
    with Bus() as bus:
        subscribe(bus, "thread", odd_fails, on_error="raise")
        emit(bus, 2)
        raise KeyError("mine")


def test_close_does_not_hide_the_error_of_the_block() -> None:
    """Leaving `with Bus()` by an exception keeps that exception; the late one is noted on it."""
    with pytest.raises(KeyError) as caught:
        fails_inside_and_in_the_background()

    assert caught.value.__notes__ == ["closing the bus then raised ValueError('no 1')"]


@in_both_kinds
def test_system_exit_in_a_subscriber_is_its_own_affair(bus: Bus, kind: str) -> None:
    """It disables that subscriber; the loop and the others go on."""
    seen: list[Event] = []
    failing = subscribe(bus, kind, exits)
    subscribe(bus, "loop", seen.append)
    emit(bus, 3)

    assert bus.flush(DEADLINE)
    assert len(seen) == 3
    assert (failing.stats.failed, failing.stats.error) == (1, "[error] SystemExit: 3")


def test_cancelled_await_in_a_subscriber_is_a_failure(bus: Bus) -> None:
    """A subscriber that awaits something cancelled has failed; its lane does not vanish."""

    async def awaits_a_cancelled(event: Event) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    subscription = bus.subscribe(awaits_a_cancelled, "after_train_iter", on_error="log")
    emit(bus, 2)

    assert bus.flush(DEADLINE)
    assert (subscription.stats.failed, subscription.stats.queued) == (2, 0)


@in_both_kinds
def test_failing_batch_fails_as_a_whole(bus: Bus, held: Held, kind: str) -> None:
    """Every event of a failed batch is counted as failed: one call, one report."""

    def fails(events: list[Event]) -> None:
        held(events)
        raise ValueError

    subscription = subscribe(bus, "thread", fails, batch=True, on_error="log")
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    emit(bus, 5)
    bus.stats()
    held.let_go()
    bus.flush(DEADLINE)

    assert (subscription.stats.calls, subscription.stats.failed, subscription.stats.delivered) == (2, 6, 0)


@in_both_kinds
def test_failing_predicate_is_a_failure(bus: Bus, kind: str) -> None:
    """An error in `when=` is counted, and handled by `on_error`, though the subscriber was not called."""
    subscription = subscribe(bus, kind, lambda event: None, when=lambda event: 1 / event.iter, on_error="log")
    emit(bus, 3)
    bus.flush(DEADLINE)

    assert (subscription.stats.calls, subscription.stats.delivered, subscription.stats.failed) == (2, 2, 1)


@in_both_kinds
@pytest.mark.parametrize("what", ["on_flush", "on_close"])
def test_failing_callback_is_told(kind: str, what: str, caplog: pytest.LogCaptureFixture) -> None:
    """An error in `on_flush` or `on_close` is logged and in the account."""

    def fails() -> None:
        raise OSError("disk full")

    bus = Bus()
    subscription = subscribe(bus, kind, lambda event: None, **{what: fails})
    bus.flush(DEADLINE)
    bus.close(DEADLINE)

    assert f"failed in {what}" in caplog.text
    assert subscription.stats.error.endswith(f"OSError: disk full (in {what})")


@pytest.mark.slow
@in_both_kinds
def test_failure_is_told_as_an_event(bus: Bus, kind: str) -> None:
    """`handler_failed` reaches async subscribers by themselves and sync handlers through `poll`."""
    told: list[HandlerFailed] = []
    mailed: list[tuple[object, Event]] = []
    there = threading.Event()

    def watch(event: HandlerFailed) -> None:
        told.append(event)
        there.set()

    subscribe(bus, kind, watch, "handler_failed")
    bus.subscribe(lambda trainer, event: mailed.append((trainer, event)), "handler_failed")
    subscription = subscribe(bus, kind, odd_fails)
    emit(bus, 2)
    assert there.wait(DEADLINE)
    assert mailed == []
    bus.poll("trainer")

    assert [(event.handler, event.error, event.count) for event in told] == [
        (subscription.name, "ValueError: no 1", 1)
    ]
    assert mailed == [("trainer", told[0])]
    assert bus.latest("handler_failed") == told[0]


def test_polled_handler_is_counted(bus: Bus) -> None:
    """`calls` counts what `poll` delivered."""
    watch = bus.subscribe(lambda event: None, "handler_failed")
    subscribe(bus, "thread", odd_fails)
    emit(bus, 2)
    bus.flush(DEADLINE)
    bus.poll()

    assert watch.stats.calls == 1


def test_failure_of_a_watcher_is_told_to_the_others(bus: Bus) -> None:
    """A subscriber to everything that fails is reported to other watchers, though not to itself."""
    told: list[HandlerFailed] = []
    there = threading.Event()

    def watch(event: HandlerFailed) -> None:
        told.append(event)
        there.set()

    mailed: list[HandlerFailed] = []
    bus.subscribe(mailed.append, "handler_failed")
    subscribe(bus, "thread", watch, "handler_failed")
    log = subscribe(bus, "thread", odd_fails, "*", on_error="log", when=lambda event: hasattr(event, "iter"))
    emit(bus, 2)
    assert there.wait(DEADLINE)
    bus.poll()

    assert [event.handler for event in told] == [log.name]
    assert mailed == told


def test_watchers_that_fail_do_not_keep_each_other_busy(bus: Bus) -> None:
    """Two subscribers that fail on each report end with one report each."""

    def fails(event: Event) -> None:
        raise ValueError

    mailed: list[HandlerFailed] = []
    bus.subscribe(mailed.append, "handler_failed")
    watchers = [subscribe(bus, "thread", fails, "handler_failed", on_error="log") for _ in range(2)]
    subscribe(bus, "thread", odd_fails)
    emit(bus, 2)
    bus.flush(DEADLINE)
    bus.flush(DEADLINE)  # the reports of the first
    bus.close(DEADLINE)
    bus.poll()

    assert [watcher.stats.failed for watcher in watchers] == [1, 1]
    assert len(mailed) == 3


def test_disabled_subscriber_is_dropped_from(bus: Bus) -> None:
    """What comes after the error is counted as dropped."""
    subscription = subscribe(bus, "thread", odd_fails, "after_train_iter", "after_val")
    emit(bus, 2)
    bus.flush(DEADLINE)
    bus.emit(AfterVal())

    assert subscription.stats.dropped == 1
