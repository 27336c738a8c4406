"""A delivery that does not return is waited for once: a close does not begin anew with what a flush has waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

import pytest

from eventloop.background.queues import subscriber as lane
from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import AfterTrainIter, Event
from tests.conftest import DEADLINE, Held
from tests.support import process_handlers as handlers
from tests.support.process_support import Start, until, waits_long
from tests.support.spilling import emit

pytest_plugins = ["tests.support.process_fixtures"]

PROMPT = DEADLINE / 2
"""Seconds that mean somebody waited for the hung subscriber after all."""


def hung(bus: Bus, held: Held, how: str) -> Subscription:
    """One that is in its first delivery, for which a flush has waited in vain, and as long as `DEADLINE`."""
    ways: dict[str, tuple[Callable[[Any], Any], str | None]] = {
        "thread": (held, "thread"),
        "task": (held.in_a_task, None),
        "blocking task": (held.on_the_loop, None),
    }
    fn, offload = ways[how]
    subscription = bus.subscribe(
        fn, "after_train_iter", offload=offload, name="hung", stall_timeout=10 * DEADLINE
    )
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    assert not bus.flush(0.1)
    waits_long(subscription)
    return subscription


@pytest.mark.slow
@pytest.mark.parametrize("how", ["thread", "task", "blocking task"])
def test_a_close_does_not_wait_again(
    held: Held, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It gives the hung one a moment; the others are delivered to, and closed, and the log says who is stuck."""
    monkeypatch.setattr(lane, "STUCK_SECONDS", 0.05)
    bus = Bus()
    seen: list[Event] = []
    closed: list[str] = []
    bus.subscribe(seen.append, "after_train_iter", offload="thread", on_close=lambda: closed.append("fine"))
    bus.subscribe(seen.append, "*", offload="thread", on_close=lambda: closed.append("listening"), name="all")
    subscription = hung(bus, held, how)
    emit(bus, 4, start=1)
    began = monotonic()

    report = bus.close(DEADLINE)

    assert monotonic() - began < PROMPT
    assert not report.complete
    assert (len(seen), closed) == (10, ["fine", "listening"])
    assert subscription.account().delivered == 0
    assert "events left undelivered: hung (" in caplog.text


def test_what_is_stuck_is_told(
    held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The account says since when, once somebody has waited in vain; so do the report and the log."""
    monkeypatch.setattr(lane, "STUCK_SECONDS", 0.05)
    bus = Bus()
    subscription = bus.subscribe(held, "after_train_iter", offload="thread", name="hung")
    emit(bus, 2)
    assert held.entered.wait(DEADLINE)
    assert subscription.stats.error == ""
    flushed = bus.flush(0.1)
    closed = bus.close(0.1)

    (stats,) = flushed.stats
    assert stats.error.startswith("stuck for 0.")
    assert stats.error.endswith(" s in one delivery")
    assert f"hung: 0 dropped, 0 failed, 2 left - {stats.error}" in str(flushed)
    assert closed.stats[0].error.startswith("[closed] stuck for 0.")
    assert "events left undelivered: hung (2), stuck for 0." in caplog.text
    held.let_go()
    until(lambda: subscription.account().delivered)
    assert subscription.account().error == "[closed]"  # one event is left


def test_what_is_stuck_in_a_callback_is_told(bus: Bus, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the callback's name."""
    monkeypatch.setattr(lane, "STUCK_SECONDS", 0.05)
    subscription = bus.subscribe(
        lambda event: None, "after_train_iter", offload="thread", on_flush=lambda: held(None)
    )
    assert not bus.flush(0.1)

    assert subscription.stats.error.endswith(" s in on_flush")


def test_a_slow_delivery_is_not_stuck(bus: Bus, held: Held) -> None:
    """What is waited for in vain for a moment is told of only when it lasts."""
    subscription = bus.subscribe(held, "after_train_iter", offload="thread")
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    bus.flush(0.01)

    assert subscription.stats.error == ""


@pytest.mark.slow
def test_a_stuck_worker_process_is_told(bus: Bus, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery in a process is one like any other."""
    monkeypatch.setattr(lane, "STUCK_SECONDS", 0.05)
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
    """Only the delivery that was waited for in vain is not waited for again; who goes on has all the time."""
    gates = [threading.Event(), threading.Event()]
    entered = [threading.Event(), threading.Event()]

    def slow(event: AfterTrainIter) -> None:
        entered[event.iter].set()
        gates[event.iter].wait(DEADLINE)

    subscription = bus.subscribe(slow, "after_train_iter", offload="thread")
    assert subscription.lane is not None
    emit(bus, 2)
    assert entered[0].wait(DEADLINE)
    bus.flush(0.05)
    assert subscription.lane.waited > 0
    gates[0].set()
    assert entered[1].wait(DEADLINE)
    assert subscription.lane.waited == 0.0
    closer = threading.Timer(0.0, bus.close, [DEADLINE])
    closer.start()
    gates[1].set()
    closer.join()

    assert subscription.stats.delivered == 2


# --- beside one that hangs ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_others_are_closed_beside_one_that_hangs(held: Held) -> None:
    """At the end of its time a close keeps a part of it for those that have nothing left, who hear of failures too."""
    bus = Bus()
    closed: list[str] = []
    bus.subscribe(held, "after_train_iter", offload="thread", name="hung")
    for name, events in (("other", "after_train_iter"), ("all", "*")):
        ends = partial(closed.append, name)
        bus.subscribe(lambda event: None, events, offload="thread", name=name, on_close=ends)
    emit(bus, 3)
    report = bus.close(1.0)

    assert not report.complete
    assert closed == ["other", "all"]
    assert [stats.error for stats in report.stats][1:] == ["", ""]


def test_one_that_only_did_not_end_in_time_has_lost_nothing(held: Held) -> None:
    """Of a subscriber whose `on_close` hangs everything is delivered, and its account has no error."""
    bus = Bus()
    bus.subscribe(lambda event: None, "after_train_iter", offload="thread", on_close=lambda: held(None))
    emit(bus, 3)
    bus.flush()  # however busy the machine is
    report = bus.close(0.2)

    assert not report.complete
    assert (report.stats[0].delivered, report.stats[0].error, report.stats[0].shortfall) == (3, "", "")
