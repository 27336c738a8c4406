"""What a bus says of what it lost: one line at its end, and a report that can be printed."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.bus.subscription import REPORT_LINES, DrainReport, SubscriptionStats
from tests.conftest import DEADLINE
from tests.support.spilling import emit


def ignores(event: Any) -> None:
    pass


def fails(event: Any) -> None:
    raise ValueError("no")


def failing_bus(count: int = 2) -> Bus:
    """A bus whose only subscriber fails on each of some events."""
    bus = Bus()
    bus.subscribe(fails, "after_train_iter", offload="thread", name="fails", on_error="log")
    emit(bus, count)
    return bus


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_close_names_who_lost_something(caplog: pytest.LogCaptureFixture) -> None:
    """One line has the counts of each subscriber with drops or failures, and of no other; the report has them, too."""
    bus = failing_bus(0)
    bus.subscribe(ignores, "after_train_iter", offload="thread", name="well")
    bus.subscribe(ignores, "after_train_iter", name="sync")
    bus.subscribe(fails, "after_train_iter", offload="thread", name="disabled")
    emit(bus, 1200)
    report = bus.close(DEADLINE)
    bus.close(DEADLINE)

    assert (report.complete, report.ok) == (True, False)
    (line,) = warnings_of(caplog)
    assert line == (
        "the bus is closed, and not everything was delivered: fails: 0 dropped, 1,200 failed of 1,200; "
        "disabled: 1,199 dropped, 1 failed of 1,200. bus.stats() has the details"
    )
    assert str(report) == (
        "dealt with in time: 1,200 delivered, not everything:\n"
        "  fails: 0 dropped, 1,200 failed, 0 left - ValueError: no (0 delivered)\n"
        "  disabled: 1,199 dropped, 1 failed, 0 left - [error] ValueError: no (0 delivered)"
    )
    assert repr(report).startswith("DrainReport(complete=True, stats=[SubscriptionStats(name='fails'")


def test_a_close_that_lost_nothing_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """No line without a loss, and one line of a report."""
    bus = Bus()
    bus.subscribe(ignores, "after_train_iter", offload="thread")
    emit(bus, 1200)
    report = bus.close(DEADLINE)

    assert report.ok
    assert warnings_of(caplog) == []
    assert str(report) == "dealt with in time: 1,200 delivered, none dropped, none failed, none left"


def test_a_forgotten_bus_tells(caplog: pytest.LogCaptureFixture) -> None:
    """A bus that was never closed says it when it has delivered the rest."""
    before = set(threading.enumerate())
    failing_bus()
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE)

    (line,) = warnings_of(caplog)
    assert "fails: 0 dropped, 2 failed of 2." in line


@pytest.mark.parametrize("end", ["flush", "close"])
def test_a_loss_that_a_run_tells_is_not_doubled(caplog: pytest.LogCaptureFixture, end: str) -> None:
    """What a run has told of does not repeat; what is lost after it is logged."""
    bus = failing_bus()
    with bus.ending_run():
        getattr(bus, end)(DEADLINE)
    assert warnings_of(caplog) == []
    if end == "flush":
        emit(bus, 1)
    bus.close(DEADLINE)

    told = [line.partition(": ")[2] for line in warnings_of(caplog)]
    assert told == (
        ["fails: 0 dropped, 3 failed of 3. bus.stats() has the details"] if end == "flush" else []
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


def test_a_delivery_that_a_close_cuts_short_is_no_error_of_its_code(caplog: pytest.LogCaptureFixture) -> None:
    """One line says that it was cut short, and no traceback looks like an error of the subscriber."""
    bus, begun = Bus(drain_timeout=0.1), threading.Event()

    async def slow(event: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    bus.subscribe(slow, "after_train_iter", name="slow")
    emit(bus, 1)
    assert begun.wait(DEADLINE)

    assert not bus.close().ok

    (line,) = [record for record in caplog.records if "during a delivery" in record.getMessage()]
    assert "subscriber slow was closed during a delivery, which counts as failed" in line.getMessage()
    assert (line.levelname, line.exc_info) == ("WARNING", None)
    assert "disabled" not in caplog.text
