"""What a bus says of what it lost: one line at its end, and a report that can be printed."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.bus.subscription import REPORT_LINES, DrainReport, SubscriptionStats
from eventloop.events import Event
from tests.conftest import DEADLINE, Held
from tests.support.spilling import emit


def ignores(event: Event) -> None:
    pass


def fails(event: Any) -> None:
    raise ValueError("no")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_close_names_who_lost_something(caplog: pytest.LogCaptureFixture) -> None:
    """One line with the counts of each subscriber that has drops or failures, and of no other."""
    bus = Bus()
    bus.subscribe(ignores, "after_train_iter", offload="thread", name="well")
    bus.subscribe(fails, "after_train_iter", offload="thread", name="disabled")
    bus.subscribe(fails, "after_train_iter", offload="thread", name="fails", on_error="log")
    emit(bus, 1200)
    report = bus.close(DEADLINE)
    bus.close(DEADLINE)

    assert (report.complete, report.ok) == (True, False)
    (line,) = warnings_of(caplog)
    assert line == (
        "the bus is closed, and not everything was delivered: disabled: 1,199 dropped, 1 failed of 1,200; "
        "fails: 0 dropped, 1,200 failed of 1,200. bus.stats() has the details"
    )


def test_a_close_that_lost_nothing_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """No line without a loss."""
    bus = Bus()
    bus.subscribe(ignores, "after_train_iter", offload="thread")
    emit(bus, 10)

    assert bus.close(DEADLINE).ok
    assert warnings_of(caplog) == []


def test_a_forgotten_bus_tells(caplog: pytest.LogCaptureFixture) -> None:
    """One that nobody closed says it when it has delivered the rest."""
    before = set(threading.enumerate())
    bus = Bus()
    bus.subscribe(fails, "after_train_iter", offload="thread", name="fails", on_error="log")
    emit(bus, 2)
    del bus
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE)

    assert warnings_of(caplog) == [
        "the bus is closed, and not everything was delivered: fails: 0 dropped, 2 failed of 2. bus.stats() has the details"
    ]


def test_who_tells_himself_is_not_doubled(caplog: pytest.LogCaptureFixture) -> None:
    """What a run has told of a close does not repeat, only what is lost after it."""
    bus = Bus()
    bus.subscribe(fails, "after_train_iter", offload="thread", name="fails", on_error="log")
    emit(bus, 2)
    with bus.telling_losses():
        bus.flush(DEADLINE)
    assert warnings_of(caplog) == []
    emit(bus, 1)
    bus.close(DEADLINE)

    assert [line.partition(": ")[2] for line in warnings_of(caplog)] == [
        "fails: 0 dropped, 3 failed of 3. bus.stats() has the details"
    ]


def test_a_close_within_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """Also where the one who tells closes the bus himself."""
    bus = Bus()
    bus.subscribe(fails, "after_train_iter", offload="thread", on_error="log")
    emit(bus, 2)
    with bus.telling_losses():
        bus.close(DEADLINE)

    assert warnings_of(caplog) == []


# --- the report --------------------------------------------------------------------------------------------


def test_complete_is_true_also_of_what_was_dropped() -> None:
    """It says that nothing was on its way any more; what became of it the printed report says, and its `repr` all."""
    bus = Bus()
    bus.subscribe(ignores, "after_train_iter", offload="thread", name="well")
    bus.subscribe(ignores, "after_train_iter", name="sync")
    bus.subscribe(fails, "after_train_iter", offload="thread", name="fails")
    emit(bus, 3)
    report = bus.close(DEADLINE)

    assert report.complete
    assert str(report) == (
        "dealt with in time: 3 delivered, not everything:\n"
        "  fails: 2 dropped, 1 failed, 0 left - [error] ValueError: no (0 delivered)"
    )
    assert repr(report).startswith("DrainReport(complete=True, stats=[SubscriptionStats(name='well'")


def test_a_report_of_a_bus_that_lost_nothing() -> None:
    """One line."""
    bus = Bus()
    bus.subscribe(ignores, "after_train_iter", offload="thread")
    emit(bus, 1200)

    assert (
        str(bus.close(DEADLINE))
        == "dealt with in time: 1,200 delivered, none dropped, none failed, none left"
    )


def test_a_report_of_what_was_left(held: Held) -> None:
    """It says that time ran out, and what is left."""
    bus = Bus()
    bus.subscribe(held, "after_train_iter", offload="thread", name="held")
    emit(bus, 3)
    report = bus.close(0.05)

    assert str(report) == (
        "time ran out: 0 delivered, not everything:\n  held: 0 dropped, 0 failed, 3 left - [closed] (0 delivered)"
    )


def test_a_report_of_many_names_a_few() -> None:
    """It stays within a screen."""
    stats = [
        SubscriptionStats(f"s{i}", "after_train_iter", "thread", 1, 0.0, 1, 1, 0, 0, 1)
        for i in range(REPORT_LINES + 3)
    ]
    lines = str(DrainReport(True, stats)).splitlines()

    assert len(lines) == REPORT_LINES + 2
    assert (lines[1], lines[-1]) == ("  s0: 1 dropped, 0 failed, 0 left (1 delivered)", "  and 3 more")
