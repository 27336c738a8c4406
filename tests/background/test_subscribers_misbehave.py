"""Background subscribers whose code raises what is no Exception, or never returns: it is their own affair."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

import pytest

from eventloop.background.queues.options import Overflow
from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import AfterTrainIter, Event, HandlerFailed, ScalarsLogged
from tests.conftest import DEADLINE, Held

in_both_kinds = pytest.mark.parametrize("kind", ["loop", "thread"])
OVERFLOWS: tuple[Overflow, ...] = ("spill", "drop_oldest", "drop_newest", "latest", "block")
PROMPT = DEADLINE / 2
"""Seconds that mean somebody waited for what hangs after all."""


class Panic(BaseException):
    """As a Rust extension raises it, and pytest its failures."""


class Unprintable(Exception):
    """An error that fails when it is told."""

    def __str__(self) -> str:
        raise ValueError("no text")


def emit(bus: Bus, times: int, start: int = 0) -> None:
    for i in range(start, start + times):
        bus.emit(AfterTrainIter(iter=i))


def subscribe(bus: Bus, kind: str, fn: Callable[[Any], object], **options: Any) -> Subscription:
    """Subscribe a plain function, as a task or on a thread."""

    async def task(event: Any) -> None:
        fn(event)

    if kind == "thread":
        return bus.subscribe(fn, "after_train_iter", offload="thread", name="bad", **options)
    return bus.subscribe(task, "after_train_iter", name="bad", **options)


def raises(error: BaseException) -> Callable[..., Any]:
    def fails(*_: Any) -> None:
        raise error

    return fails


def ignores(event: Any) -> None:
    pass


def told_of(bus: Bus) -> list[HandlerFailed]:
    """The failures of which a synchronous handler hears."""
    told: list[HandlerFailed] = []
    bus.subscribe(told.append, "handler_failed")
    return told


def others(bus: Bus) -> list[Any]:
    """What a subscriber beside the bad one is given."""
    seen: list[Any] = []
    bus.subscribe(seen.append, "after_train_iter", offload="thread", name="other")
    return seen


def wait_until(true: Callable[[], object], look: Callable[[], object] = bool) -> None:
    deadline = monotonic() + DEADLINE
    while not true() and monotonic() < deadline:
        look()
    assert true()


def looks(bus: Bus) -> Callable[[], object]:
    """A thread that waits for the bus, and hears of failures."""

    def look() -> None:
        bus.flush(0.01)
        bus.poll()

    return look


# --- errors that are no Exception --------------------------------------------------------------------------


@in_both_kinds
@pytest.mark.parametrize("error", [Panic, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_whatever_a_handler_raises_is_its_own_failure(
    bus: Bus, kind: str, error: type[BaseException]
) -> None:
    """It is counted and told for each event, and the others are delivered to."""
    told, seen = told_of(bus), others(bus)
    bad = subscribe(bus, kind, raises(error("oh")), on_error="log")
    emit(bus, 3)

    assert bus.flush(DEADLINE)
    bus.poll()
    assert (bad.stats.failed, bad.stats.queued, len(seen)) == (3, 0, 3)
    assert [event.error for event in told] == [f"{error.__name__}: oh"] * 3


@in_both_kinds
def test_a_panic_is_treated_by_on_error(bus: Bus, kind: str) -> None:
    """With "raise" the training thread gets it as it was raised."""
    subscribe(bus, kind, raises(Panic("rust")), on_error="raise")
    emit(bus, 1)
    bus.flush(DEADLINE)

    with pytest.raises(Panic, match="rust"):
        bus.poll()


@in_both_kinds
@pytest.mark.parametrize("error", [Panic, SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("what", ["on_flush", "on_close"])
def test_whatever_a_callback_raises_is_told(kind: str, what: str, error: type[BaseException]) -> None:
    """`on_flush` and `on_close` fail for themselves: everything is delivered, and the bus closes as ever."""
    bus = Bus()
    told, seen = told_of(bus), others(bus)
    bad = subscribe(bus, kind, ignores, **{what: raises(error("oh"))})
    emit(bus, 3)

    assert bus.flush(DEADLINE)
    assert bus.close(DEADLINE).complete
    bus.poll()
    assert (bad.stats.delivered, len(seen)) == (3, 3)
    assert [event.error for event in told] == [f"{error.__name__}: oh"]
    assert bad.stats.error == f"{error.__name__}: oh (in {what})"


@in_both_kinds
@pytest.mark.parametrize("error", [Panic, SystemExit, asyncio.CancelledError])
def test_whatever_a_filter_raises_is_a_failure(bus: Bus, kind: str, error: type[BaseException]) -> None:
    """An event over which `when=` fails has failed, for its subscriber alone."""
    told, seen = told_of(bus), others(bus)
    bad = subscribe(bus, kind, ignores, when=raises(error("oh")), on_error="log")
    emit(bus, 3)

    assert bus.flush(DEADLINE)
    bus.poll()
    assert (bad.stats.calls, bad.stats.failed, len(seen)) == (0, 3, 3)
    assert [event.error for event in told] == [f"{error.__name__}: oh"] * 3


def test_a_filter_that_is_asked_by_the_producer_fails_for_itself(bus: Bus) -> None:
    """With overflow="block" `when=` runs in the emit, which goes on whatever it raises."""
    bad = subscribe(bus, "thread", ignores, when=raises(Panic("rust")), on_error="log", overflow="block")
    emit(bus, 2)

    assert (bad.stats.failed, bad.stats.error) == (2, "Panic: rust")


class Exits:
    """A deferred of a foreign hand."""

    def ready(self) -> bool:
        raise SystemExit(3)

    def events(self) -> Iterable[Event]:
        return ()


def test_a_deferred_that_exits_holds_nobody_up(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    """Its events are dropped, counted and logged; the loop goes on."""
    seen = others(bus)
    subscription = bus.subscribe(ignores, "scalars_logged", offload="thread")
    bus.post(Exits(), ScalarsLogged)
    emit(bus, 1)

    assert bus.flush(DEADLINE)
    assert (len(seen), subscription.stats.dropped) == (1, 1)
    assert "events could not be made" in caplog.text
    assert "SystemExit: 3" in caplog.text


@in_both_kinds
def test_a_lane_that_cannot_go_on_ends_alone(bus: Bus, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """An error that cannot even be told ends that subscriber, which is told; nobody else notices."""
    told, seen = told_of(bus), others(bus)
    bad = subscribe(bus, kind, raises(Unprintable()), on_error="log")
    emit(bus, 3)

    assert bus.flush(DEADLINE)
    bus.poll()
    assert len(seen) == 3
    assert (bad.stats.failed, bad.stats.dropped, bad.stats.queued) == (1, 2, 0)
    assert [event.error for event in told] == ["RuntimeError: its deliveries ended with a ValueError"]
    assert "background subscriber bad cannot go on; please report this" in caplog.text


# --- callbacks that never return ---------------------------------------------------------------------------


@pytest.mark.representative(2)
@in_both_kinds
@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_a_hung_on_flush_is_a_stall(bus: Bus, held: Held, kind: str, overflow: Overflow) -> None:
    """After `stall_timeout` in `on_flush` a subscriber is given up, told, and lets nobody wait for room."""
    told = told_of(bus)
    bad = subscribe(
        bus, kind, ignores, overflow=overflow, queue=1, stall_timeout=0.05, on_flush=lambda: held(None)
    )
    emit(bus, 1)
    began = monotonic()
    bus.flush(DEADLINE)
    assert held.entered.is_set()
    emit(bus, 4, start=1)
    bus.poll()

    assert monotonic() - began < PROMPT
    assert [event.handler for event in told] == ["bad"]
    assert "bad spent more than stall_timeout=0.05 s in on_flush; it is no longer" in told[0].error
    account = bad.account()
    assert account.error.startswith("[stalled]")
    assert (account.delivered, account.failed) == (1, 0)


def test_emits_into_a_full_queue_outlast_a_hung_on_flush(bus: Bus, held: Held) -> None:
    """The emitting thread itself finds that the subscriber it waits for stalls in `on_flush`."""
    told = told_of(bus)
    bad = subscribe(
        bus, "thread", ignores, overflow="block", queue=1, stall_timeout=0.05, on_flush=lambda: held(None)
    )
    assert bad.lane is not None
    bad.lane.flush_soon()
    assert held.entered.wait(DEADLINE)
    emit(bus, 4)
    bus.poll()

    assert [event.handler for event in told] == ["bad"]
    assert bad.stats.dropped == 4


@in_both_kinds
@pytest.mark.parametrize("fn", [ignores, raises(ValueError("no"))], ids=["well", "failed"])
def test_a_hung_on_close_is_a_stall(held: Held, kind: str, fn: Callable[[Any], object]) -> None:
    """A close waits no longer for `on_close` than for a delivery, also that of one which has failed."""
    bus = Bus()
    told = told_of(bus)
    bad = subscribe(bus, kind, fn, stall_timeout=0.05, on_close=lambda: held(None))
    emit(bus, 1)
    closer = threading.Thread(target=bus.close, args=(DEADLINE,))
    closer.start()
    wait_until(lambda: bad.account().error.startswith("[stalled]"))
    if kind == "loop":  # a bus does wait for that, which `on_close` holds
        held.let_go()
    closer.join(PROMPT)
    assert not closer.is_alive()
    bus.poll()

    assert "bad spent more than stall_timeout=0.05 s in on_close; it is no longer" in told[-1].error


def test_a_callback_that_stalled_and_fails_after_all_is_told_once(bus: Bus, held: Held) -> None:
    """Its late error changes nothing."""

    def fails_late() -> None:
        held(None)
        raise OSError("too late")

    told = told_of(bus)
    bad = subscribe(bus, "thread", ignores, stall_timeout=0.05, on_flush=fails_late)
    bus.flush(DEADLINE)
    held.let_go()
    assert bad.lane is not None
    assert bad.lane.closed.wait(DEADLINE)
    bus.poll()

    assert len(told) == 1
    assert "too late" not in bad.stats.error


# --- filters that never return -----------------------------------------------------------------------------


def hang_in_filter(bus: Bus, held: Held, **options: Any) -> Subscription:
    """Subscribe one whose filter hangs, with others beside it, and let the loop ask it."""
    bad = subscribe(bus, "thread", ignores, when=held, **options)
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    return bad


def accounted(subscription: Subscription) -> int:
    account = subscription.account()
    return account.delivered + account.failed + account.dropped + account.queued


@pytest.mark.slow
def test_a_close_is_not_held_by_a_filter(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    """A filter that hangs costs a close its timeout; it is told, and every event is in an account."""
    bus = Bus()
    told = told_of(bus)
    plain = bus.subscribe(ignores, "after_train_iter", offload="thread")
    bad = hang_in_filter(bus, held)
    filtered = bus.subscribe(ignores, "after_train_iter", offload="thread", when=lambda event: True)
    emit(bus, 4, start=1)
    began = monotonic()

    report = bus.close(0.2)

    assert monotonic() - began < PROMPT
    assert not report.complete
    bus.poll()
    assert [event.handler for event in told] == ["bad"]
    assert "bad was still in its when= when the bus closed, after" in told[0].error
    assert "bad was still in its when= when the bus closed, after" in caplog.text
    assert [accounted(each) for each in (bad, plain, filtered)] == [5, 5, 4]
    assert (bad.account().failed, bad.account().dropped + bad.account().queued) == (1, 4)


@pytest.mark.slow
def test_a_second_filter_that_hangs_holds_no_close(held: Held) -> None:
    """Nor does one that hangs only when the close itself has it asked."""
    bus = Bus()
    told = told_of(bus)
    subscribe(bus, "loop", held)  # holds the loop
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    bad = bus.subscribe(ignores, "after_train_iter", offload="thread", when=held, name="second")
    emit(bus, 3)
    began = monotonic()

    bus.close(0.1)

    assert monotonic() - began < PROMPT
    bus.poll()
    assert "second" in [event.handler for event in told]
    assert accounted(bad) == 3


def test_a_filter_that_stalls_is_told(bus: Bus, held: Held) -> None:
    """After `stall_timeout` in `when=` the event has failed and the subscriber is given up."""
    told = told_of(bus)
    bad = hang_in_filter(bus, held, stall_timeout=0.1)
    wait_until(lambda: told, looks(bus))

    assert "bad spent more than stall_timeout=0.1 s in its when=; it is no longer waited for" in told[0].error
    account = bad.account()
    assert (account.failed, account.delivered) == (1, 0)
    assert account.error.startswith("[stalled]")


def test_a_filter_that_stalled_and_returns_is_counted_once(bus: Bus, held: Held) -> None:
    """The loop goes on with everybody else; what comes then is dropped, and the filter is asked no more."""
    told, seen = told_of(bus), others(bus)
    bad = hang_in_filter(bus, held, stall_timeout=0.1)
    wait_until(lambda: told, looks(bus))
    held.let_go()
    emit(bus, 4, start=1)

    assert bus.flush(DEADLINE)
    assert len(seen) == 5
    assert len(held.seen) == 1
    assert (bad.stats.failed, bad.stats.dropped, bad.stats.delivered) == (1, 4, 0)


@pytest.mark.slow
def test_the_interpreter_exits_beside_a_filter_that_hangs(
    python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Within the bus's `drain_timeout`, and with a word about it."""
    ran = python(
        "import threading\n"
        "from eventloop.bus import Bus\n"
        "from eventloop.events import AfterTrainIter\n"
        "bus, entered = Bus(drain_timeout=0.2), threading.Event()\n"
        "def hangs(event):\n"
        "    entered.set()\n"
        "    threading.Event().wait()\n"
        "bus.subscribe(print, 'after_train_iter', offload='thread', when=hangs, name='bad')\n"
        "for i in range(3): bus.emit(AfterTrainIter(iter=i))\n"
        "entered.wait()\n"
    )

    assert (ran.returncode, ran.stdout) == (0, "")
    assert "subscriber bad was still in its when= when the bus closed" in ran.stderr


# --- flushes ------------------------------------------------------------------------------------------------


class Steps:
    """Calls that wait in turn, each for its own permission."""

    def __init__(self, count: int) -> None:
        self.begun = [threading.Event() for _ in range(count)]
        self.allowed = [threading.Event() for _ in range(count)]
        self._next = iter(range(count))

    def __call__(self, *_: Any) -> None:
        turn = next(self._next)
        self.begun[turn].set()
        assert self.allowed[turn].wait(DEADLINE)
