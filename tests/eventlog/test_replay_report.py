"""What a replay reports: what became of the events, and which subscribers did not take everything."""

from __future__ import annotations

import os
import threading

import msgspec
import pytest

from eventloop import replay
from eventloop.bus import Bus
from eventloop.eventlog.format import pack
from eventloop.eventlog.replay import Loss
from eventloop.events import Event, ScalarsLogged
from tests.conftest import DEADLINE, Held
from tests.eventlog.conftest import EVENTS, Record
from tests.support.internals import drain_after
from tests.support.process_support import until


def test_a_subscriber_that_stalled_is_told(record: Record, bus: Bus, held: Held) -> None:
    """Which one, how many events it lost, and why; that others had all of them."""
    heard: list[Event] = []
    bus.subscribe(held, "after_train_iter", offload="thread", name="held", stall_timeout=0.05)
    bus.subscribe(heard.append, "after_train_iter", "after_val_epoch", offload="thread")

    report = replay(record(), bus)

    stalled = "[stalled] subscriber held spent more than stall_timeout=0.05 s on one delivery; it is no longer waited for"
    assert report.lost == {"held": Loss(failed=1, dropped=1, error=stalled)}
    told = f"6 events replayed; held lost 2 events: 1 failed, 1 dropped ({stalled})"
    assert str(report) == told
    assert heard == [EVENTS[1], EVENTS[3], EVENTS[5]]


def test_a_subscriber_without_room_is_told(record: Record, bus: Bus, held: Held) -> None:
    """What a queue of less than 256 events had no room for is counted."""
    bus.subscribe(held, "scalars_logged", offload="thread", name="held", queue=1, overflow="drop_newest")
    directory = record([ScalarsLogged(step=step) for step in range(256)])

    def let_go() -> None:
        until(lambda: bus.stats()[0].dropped)
        held.let_go()

    letting_go = threading.Thread(target=let_go)
    letting_go.start()
    report = replay(directory, bus)
    letting_go.join(DEADLINE)

    assert report.lost == {"held": Loss(dropped=256 - len(held.seen))}
    dropped = report.lost["held"].dropped
    assert str(report).endswith(f"; held lost {dropped:,} events: {dropped:,} dropped")


def test_what_a_subscriber_lost_before_is_not_told(record: Record, bus: Bus) -> None:
    """The report is of this replay; a subscriber that had ended was given none of it."""

    def fail(event: Event) -> None:
        raise ValueError("no luck")

    bus.subscribe(fail, "after_train_iter", offload="thread", name="fails", on_error="log")
    bus.subscribe(fail, "after_val_epoch", offload="thread", name="ended")
    directory = record()

    first = replay(directory, bus)
    second = replay(directory, bus)
    third = replay(directory, bus, only="scalars_logged")

    assert first.lost["fails"] == second.lost["fails"] == Loss(failed=2, error="ValueError: no luck")
    assert first.lost["ended"] == Loss(failed=1, error="[error] ValueError: no luck")
    assert second.lost["ended"] == Loss(dropped=1, error="[error] ValueError: no luck")
    assert third.lost == {}


def test_a_subscriber_that_could_not_be_flushed_is_told(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has lost no event, and may have written none. The replay waits no longer than the bus's `drain_timeout` for one
    that takes too long."""
    gate = threading.Event()

    def flush() -> None:
        raise OSError(28, "No space left on device")

    with Bus(drain_timeout=0.05) as bus:
        full = bus.subscribe(lambda event: None, "*", offload="thread", name="full", on_flush=flush)
        bus.subscribe(
            lambda event: None,
            "*",
            offload="thread",
            name="hangs",
            on_flush=lambda: gate.wait(DEADLINE) and None,
        )
        drain_after(monkeypatch, lambda: full.account().error)
        report = replay(record(), bus)
        gate.set()
        bus.close(DEADLINE)

    error = "OSError: [Errno 28] No space left on device (in on_flush)"
    assert (report.lost["full"], report.flushed) == (Loss(error=error), False)
    told = f"6 events replayed; full failed: {error}; the bus was not flushed within its drain_timeout"
    assert str(report) == told


def test_unknown_events_are_told_with_what_to_do(record: Record, bus: Bus) -> None:
    """The module that declares them has to be imported."""
    directory = record()
    payload = msgspec.msgpack.encode(("of_nobody", 9, 0.0, 0, {}))
    with (directory / "events.evl").open("ab") as file:
        file.write(pack(payload) + payload)

    report = replay(directory, bus)

    assert report.unknown == {"of_nobody": 1}
    expected = "1 of an unknown type: of_nobody (1); import the module that declares them first"
    assert str(report) == f"6 events replayed; {expected}"


def test_a_log_without_events_is_empty(record: Record, bus: Bus) -> None:
    """One whose events were left out, or are unknown, is not."""
    directory = record()

    assert not replay(directory, bus, only="after_test").empty
    os.truncate(directory / "events.evl", 12)
    assert replay(directory, bus).empty
