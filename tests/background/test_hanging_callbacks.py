"""Callbacks and filters of background subscribers that never return: each costs its own subscriber alone."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest

from eventloop.background.queues.options import Overflow
from eventloop.bus import Bus
from eventloop.events import Event, HandlerFailed
from tests.conftest import DEADLINE, Held
from tests.support import process_handlers as handlers
from tests.support.internals import drain_after, substitute
from tests.support.process_support import Lines, until
from tests.support.spilling import PROMPT, emit, in_both_kinds, subscribe, total

pytest_plugins = ["tests.support.process_fixtures"]


def ignores(event: Any) -> None:
    pass


def fails(event: Any) -> None:
    raise ValueError("no")


def reports_of(bus: Bus) -> list[HandlerFailed]:
    """The failures that a sync handler hears of, after a poll."""
    told: list[HandlerFailed] = []
    bus.subscribe(told.append, "handler_failed")
    return told


# --- callbacks ---------------------------------------------------------------------------------------------


@pytest.mark.representative(2)
@in_both_kinds
@pytest.mark.parametrize("overflow", ["spill", "block"])
def test_a_hung_on_flush_is_a_stall(bus: Bus, held: Held, kind: str, overflow: Overflow) -> None:
    """After `stall_timeout` in `on_flush` a subscriber is given up and reported, and no emit waits for its queue."""
    told = reports_of(bus)
    bad = subscribe(
        bus,
        kind,
        ignores,
        name="bad",
        overflow=overflow,
        queue=1,
        stall_timeout=0.05,
        on_flush=lambda: held(None),
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
    told = reports_of(bus)
    bad = subscribe(
        bus,
        "thread",
        ignores,
        name="bad",
        overflow="block",
        queue=1,
        stall_timeout=0.05,
        on_flush=lambda: held(None),
    )
    assert bad.subscriber is not None
    bad.subscriber.request_flush()
    assert held.entered.wait(DEADLINE)
    emit(bus, 4)
    bus.poll()

    assert [event.handler for event in told] == ["bad"]
    assert bad.stats.dropped == 4


@pytest.mark.representative(2)
@in_both_kinds
@pytest.mark.parametrize("fn", [ignores, fails])
def test_a_hung_on_close_is_a_stall(held: Held, kind: str, fn: Callable[[Any], object]) -> None:
    """A close waits no longer for `on_close` than for a delivery, also that of a subscriber which has failed."""
    bus = Bus()
    told = reports_of(bus)
    bad = subscribe(bus, kind, fn, name="bad", stall_timeout=0.05, on_close=lambda: held(None))
    emit(bus, 1)
    closer = threading.Thread(target=bus.close, args=(DEADLINE,))
    closer.start()
    until(lambda: bad.account().error.startswith("[stalled]"))
    if kind == "loop":  # a bus does wait for that, which `on_close` holds
        held.let_go()
    closer.join(PROMPT)
    assert not closer.is_alive()
    bus.poll()

    assert "bad spent more than stall_timeout=0.05 s in on_close; it is no longer" in told[-1].error


def test_a_callback_that_stalled_and_fails_after_all_is_reported_once(bus: Bus, held: Held) -> None:
    """Its late error changes nothing."""

    def fails_late() -> None:
        held(None)
        raise OSError("too late")

    told = reports_of(bus)
    bad = subscribe(bus, "thread", ignores, stall_timeout=0.05, on_flush=fails_late)
    bus.flush(DEADLINE)
    held.let_go()
    assert bad.subscriber is not None
    assert bad.subscriber.closed.wait(DEADLINE)
    bus.poll()

    assert len(told) == 1
    assert "too late" not in bad.stats.error


def test_a_stuck_callback_is_named(bus: Bus, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a flush has waited for it in vain, the account says in which callback the subscriber is."""
    substitute(monkeypatch, "awaited.STUCK_SECONDS", 0.05)
    drain_after(monkeypatch, held.entered.is_set)
    subscription = subscribe(bus, "thread", ignores, on_flush=lambda: held(None))
    assert not bus.flush(0.1)

    assert subscription.stats.error.endswith(" s in on_flush")


@pytest.mark.parametrize("how", ["thread", "task", pytest.param("process", marks=pytest.mark.slow)])
def test_a_close_names_whom_it_waited_for(
    held: Held, lines: Lines, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If an `on_close` hangs, everything is delivered all the same; the log and the report say who is in which call."""
    substitute(monkeypatch, "awaited.STUCK_SECONDS", DEADLINE)  # else a busy machine makes it "stuck"
    bus = Bus(drain_timeout=DEADLINE)
    if how == "process":
        options: dict[str, Any] = {"offload": "process", "on_close": handlers.hang_at_the_close}
        bus.subscribe(handlers.record, "after_train_iter", name="slow", **options)
    else:
        kind = "thread" if how == "thread" else "loop"
        subscribe(bus, kind, ignores, name="slow", on_close=lambda: held(None))
        drain_after(monkeypatch, held.entered.is_set)
    emit(bus, 3)
    assert bus.flush()
    report = bus.close(0.5)

    (stats,) = report.stats
    assert not report.complete
    assert (stats.delivered, stats.dropped, stats.failed, stats.queued) == (3, 0, 0, 0)
    assert re.fullmatch(r"\[closed\] in on_close for \d+\.\d s", stats.error)
    assert stats.error in str(report)
    assert re.search(r"events left undelivered: slow \(0\), in on_close for \d+\.\d s", caplog.text)


# --- filters -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_close_is_not_held_by_a_filter(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    """A filter that hangs costs a close its timeout; it is reported, and every event is in an account."""
    bus = Bus()
    told = reports_of(bus)
    plain = subscribe(bus, "thread", ignores)
    bad = subscribe(bus, "thread", ignores, name="bad", when=held)
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    filtered = subscribe(bus, "thread", ignores, when=lambda event: True)
    emit(bus, 4, start=1)
    began = monotonic()

    report = bus.close(0.2)

    assert monotonic() - began < PROMPT
    assert not report.complete
    bus.poll()
    assert [event.handler for event in told] == ["bad"]
    assert "bad was still in its when= when the bus closed, after" in told[0].error
    assert "bad was still in its when= when the bus closed, after" in caplog.text
    assert [total(each.account()) for each in (bad, plain, filtered)] == [5, 5, 4]
    assert (bad.account().failed, bad.account().dropped + bad.account().queued) == (1, 4)


def test_a_filter_that_hangs_hangs_its_owner_alone(bus: Bus, held: Held) -> None:
    """The others are delivered to, accounts are read at once, and emits do not wait."""
    seen: list[Event] = []
    bad = subscribe(bus, "thread", ignores, when=held)
    subscribe(bus, "thread", seen.append)
    emit(bus, 10)
    assert held.entered.wait(DEADLINE)
    until(lambda: len(seen) == 10)
    stats = bad.stats
    held.let_go()

    assert (stats.queued, stats.delivered) == (10, 0)


def test_a_filter_that_stalls_is_given_up(bus: Bus, held: Held) -> None:
    """After `stall_timeout` in `when=` the event has failed; what comes then is dropped, and the filter not asked."""
    told, seen = reports_of(bus), list[Event]()
    subscribe(bus, "thread", seen.append)
    bad = subscribe(bus, "thread", ignores, name="bad", when=held, stall_timeout=0.1)
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)

    def reported() -> bool:
        bus.flush(0.01)
        bus.poll()
        return bool(told)

    until(reported)
    assert "bad spent more than stall_timeout=0.1 s in its when=; it is no longer waited for" in told[0].error
    assert (bad.account().failed, bad.account().delivered) == (1, 0)
    assert bad.account().error.startswith("[stalled]")
    held.let_go()
    emit(bus, 4, start=1)

    assert bus.flush(DEADLINE)
    until(lambda: held.seen)  # the filter's own thread returns from its call
    assert (len(seen), len(held.seen)) == (5, 1)
    assert (bad.stats.failed, bad.stats.dropped, bad.stats.delivered) == (1, 4, 0)
