"""Background subscribers that raise: what happens to them, and where it is reported."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, AfterVal, Event, HandlerFailed
from tests.conftest import DEADLINE, Held
from tests.support.spilling import emit, in_both_kinds, subscribe


class Panic(BaseException):
    """As a Rust extension raises it, and pytest its failures."""


class Unprintable(Exception):
    """An error that fails when it is printed."""

    def __str__(self) -> str:
        raise ValueError("no text")


def odd_fails(event: AfterTrainIter) -> None:
    if event.iter % 2:
        raise ValueError(f"no {event.iter}")


def ignores(event: Any) -> None:
    pass


def raises(error: BaseException) -> Callable[..., Any]:
    def fails(*_: Any) -> None:
        raise error

    return fails


@pytest.fixture
def failures(bus: Bus) -> list[HandlerFailed]:
    """The failures that a sync handler hears of, after a poll."""
    failures: list[HandlerFailed] = []
    bus.subscribe(failures.append, "handler_failed")
    return failures


@pytest.fixture
def other(bus: Bus) -> list[Any]:
    """The events that a subscriber gets which does not fail."""
    seen: list[Any] = []
    bus.subscribe(seen.append, "after_train_iter", offload="thread", name="other")
    return seen


# --- what becomes of the subscriber ------------------------------------------------------------------------


@in_both_kinds
def test_disable_stops_delivering_after_the_first_error(
    bus: Bus, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By default a failed subscriber is logged once with its traceback, and gets no more, neither then nor later."""
    subscription = subscribe(bus, kind, odd_fails, "after_train_iter", "after_val")
    emit(bus, 10)
    bus.flush(DEADLINE)
    bus.emit(AfterVal())
    stats = subscription.stats

    assert (stats.calls, stats.delivered, stats.failed, stats.dropped, stats.queued) == (2, 1, 1, 9, 0)
    assert stats.error == "[error] ValueError: no 1"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "and is disabled" in caplog.text
    assert "in odd_fails" in caplog.text


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
    """With "raise" the training thread gets each error, with its own traceback and a note of whose it is."""
    subscribe(bus, kind, odd_fails, on_error="raise", name="picky")
    emit(bus, 4)
    bus.flush(DEADLINE)

    for i in (1, 3):
        with pytest.raises(ValueError, match=f"no {i}") as caught:
            bus.poll()
        assert caught.traceback[-1].name == "odd_fails"
        assert caught.value.__notes__ == [
            f"raised by background subscriber picky ({kind}) on {AfterTrainIter(iter=i)!r}"
        ]
    bus.poll()


@in_both_kinds
def test_failing_batch_fails_as_a_whole(held: Held, kind: str) -> None:
    """Every event of it is counted as failed; its error's note has the first event, and their number."""

    def fails(events: list[Event]) -> None:
        held(events)
        raise ValueError("no batch")

    bus = Bus()
    subscription = subscribe(bus, kind, fails, on_error="raise", batch=True, name="picky")
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    emit(bus, 3)
    held.let_go()

    notes = []
    for _ in range(2):
        with pytest.raises(ValueError, match="no batch") as caught:
            bus.close(DEADLINE)
        notes += caught.value.__notes__
    first = f"raised by background subscriber picky ({kind}) on {AfterTrainIter(iter=0)!r}"
    assert notes == [first, f"{first}, the first of a batch of 3"]
    stats = subscription.stats
    assert (stats.calls, stats.failed, stats.delivered) == (2, 4, 0)


@pytest.mark.parametrize("what", ["on_flush", "on_close"])
def test_raise_says_in_which_callback_an_error_is(what: str) -> None:
    """An error that is no event's has the callback in its note."""
    bus = Bus()
    options: dict[str, Any] = {what: raises(OSError("disk full"))}
    bus.subscribe(ignores, "after_train_iter", offload="thread", on_error="raise", name="picky", **options)
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


# --- whatever is raised, wherever --------------------------------------------------------------------------


@in_both_kinds
@pytest.mark.parametrize(
    "error", [Panic, KeyboardInterrupt, GeneratorExit, SystemExit, asyncio.CancelledError]
)
def test_whatever_a_handler_raises_is_its_own_failure(
    bus: Bus, kind: str, error: type[BaseException], failures: list[HandlerFailed], other: list[Any]
) -> None:
    """It is counted and reported for each event, and the others are delivered to."""
    bad = subscribe(bus, kind, raises(error("oh")), on_error="log")
    emit(bus, 3)

    assert bus.flush(DEADLINE)
    bus.poll()
    assert (bad.stats.failed, bad.stats.queued, len(other)) == (3, 0, 3)
    assert [event.error for event in failures] == [f"{error.__name__}: oh"] * 3


def test_an_error_without_a_text_is_its_type(bus: Bus) -> None:
    """As of a wait that took too long: no colon stands before nothing."""
    bad = subscribe(bus, "thread", raises(TimeoutError()))
    emit(bus, 1)
    bus.flush(DEADLINE)

    assert bad.stats.error == "[error] TimeoutError"


def test_cancelled_await_in_a_subscriber_is_a_failure(bus: Bus) -> None:
    """A subscriber that awaits something cancelled has failed; its task goes on."""

    async def awaits_a_cancelled(event: Event) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    subscription = bus.subscribe(awaits_a_cancelled, "after_train_iter", on_error="log")
    emit(bus, 2)

    assert bus.flush(DEADLINE)
    assert (subscription.stats.failed, subscription.stats.queued) == (2, 0)


@in_both_kinds
@pytest.mark.parametrize("error", [OSError, Panic, SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("what", ["on_flush", "on_close"])
def test_whatever_a_callback_raises_is_reported(
    bus: Bus,
    kind: str,
    what: str,
    error: type[BaseException],
    failures: list[HandlerFailed],
    other: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`on_flush` and `on_close` fail for themselves: everything is delivered, and the bus closes as ever."""
    options: dict[str, Any] = {what: raises(error("oh"))}
    bad = subscribe(bus, kind, ignores, **options)
    emit(bus, 3)

    assert bus.flush(DEADLINE)
    assert bus.close(DEADLINE).complete
    bus.poll()
    assert (bad.stats.delivered, len(other)) == (3, 3)
    assert [event.error for event in failures] == [f"{error.__name__}: oh"]
    assert bad.stats.error == f"{error.__name__}: oh (in {what})"
    assert f"failed in {what}" in caplog.text


@in_both_kinds
@pytest.mark.parametrize("error", [ValueError, Panic, SystemExit, asyncio.CancelledError])
def test_whatever_a_filter_raises_is_a_failure(
    bus: Bus, kind: str, error: type[BaseException], failures: list[HandlerFailed], other: list[Any]
) -> None:
    """An event over which `when=` fails has failed, for its subscriber alone, which is not called for it."""

    def picky(event: AfterTrainIter) -> bool:
        if event.iter == 1:
            raise error("oh")
        return True

    bad = subscribe(bus, kind, ignores, when=picky, on_error="log")
    emit(bus, 3)

    assert bus.flush(DEADLINE)
    bus.poll()
    assert (bad.stats.calls, bad.stats.delivered, bad.stats.failed, len(other)) == (2, 2, 1, 3)
    assert [event.error for event in failures] == [f"{error.__name__}: oh"]


def test_a_filter_that_is_asked_by_the_producer_fails_for_itself(bus: Bus) -> None:
    """With overflow="block" `when=` runs in the emit, which goes on whatever it raises."""
    bad = subscribe(bus, "thread", ignores, when=raises(Panic("rust")), on_error="log", overflow="block")
    emit(bus, 2)

    assert (bad.stats.failed, bad.stats.error) == (2, "Panic: rust")


@in_both_kinds
def test_a_subscriber_that_cannot_go_on_ends_alone(
    bus: Bus, kind: str, failures: list[HandlerFailed], other: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """An error that cannot even be printed ends that subscriber, with a report; the others do not notice."""
    bad = subscribe(bus, kind, raises(Unprintable()), on_error="log", name="bad")
    emit(bus, 3)

    assert bus.flush(DEADLINE)
    bus.poll()
    assert len(other) == 3
    assert (bad.stats.failed, bad.stats.dropped, bad.stats.queued) == (1, 2, 0)
    assert [event.error for event in failures] == ["RuntimeError: its deliveries ended with a ValueError"]
    assert "background subscriber bad cannot go on; please report this" in caplog.text


# --- the report --------------------------------------------------------------------------------------------


@in_both_kinds
def test_failure_is_reported_as_an_event(bus: Bus, kind: str) -> None:
    """`handler_failed` reaches background subscribers by itself, and sync handlers through `poll`, which counts it."""
    failures: list[HandlerFailed] = []
    polled: list[tuple[object, Event]] = []
    there = threading.Event()

    def watch(event: HandlerFailed) -> None:
        failures.append(event)
        there.set()

    subscribe(bus, kind, watch, "handler_failed", name="background")
    sync = bus.subscribe(lambda trainer, event: polled.append((trainer, event)), "handler_failed")
    subscription = subscribe(bus, kind, odd_fails)
    emit(bus, 2)
    assert there.wait(DEADLINE)
    assert polled == []
    bus.poll("trainer")

    assert [(event.handler, event.error, event.count) for event in failures] == [
        (subscription.name, "ValueError: no 1", 1)
    ]
    assert polled == [("trainer", failures[0])]
    assert sync.stats.calls == 1
    assert bus.latest("handler_failed") == failures[0]


def test_failure_of_a_watcher_is_reported_to_the_others(bus: Bus, failures: list[HandlerFailed]) -> None:
    """A subscriber to everything that fails is reported to other watchers, though not to itself."""
    watched: list[HandlerFailed] = []
    bus.subscribe(watched.append, "handler_failed", offload="thread")
    log = bus.subscribe(
        odd_fails, "*", offload="thread", on_error="log", when=lambda event: hasattr(event, "iter")
    )
    emit(bus, 2)
    bus.flush(DEADLINE)
    bus.poll()

    assert [event.handler for event in watched] == [log.name]
    assert failures == watched


def test_watchers_that_fail_do_not_keep_each_other_busy(bus: Bus, failures: list[HandlerFailed]) -> None:
    """Two subscribers that fail on each report end with one report each."""
    watchers = [
        subscribe(bus, "thread", raises(ValueError()), "handler_failed", on_error="log") for _ in range(2)
    ]
    subscribe(bus, "thread", odd_fails)
    emit(bus, 2)
    bus.flush(DEADLINE)
    bus.flush(DEADLINE)  # the reports of the first
    bus.close(DEADLINE)
    bus.poll()

    assert [watcher.stats.failed for watcher in watchers] == [1, 1]
    assert len(failures) == 3
