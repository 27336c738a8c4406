"""A coroutine that blocks the loop of all coroutine subscribers: it is named, and the others are not blamed for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, AfterVal, HandlerFailed
from tests.conftest import DEADLINE, Held
from tests.support.internals import substitute
from tests.support.process_support import until
from tests.support.spilling import emit, total

EVENTS = 200
CURE = 'make it a plain function with offload="thread", or await in it what takes long'


@pytest.fixture(autouse=True)
def stuck_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a delivery stuck when a flush has waited for it for a moment."""
    substitute(monkeypatch, "awaited.STUCK_SECONDS", 0.05)


def test_the_coroutine_that_holds_the_loop_is_named(
    bus: Bus, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    """It alone has stalled; one that awaits beside it waits without a fault, and goes on when the loop is free."""
    seen: list[int] = []
    told: list[HandlerFailed] = []

    async def other(event: AfterTrainIter) -> None:
        await asyncio.sleep(0.001)
        seen.append(event.iter)

    bus.subscribe(told.append, "handler_failed")
    culprit = bus.subscribe(held.on_the_loop, "after_val", name="culprit", stall_timeout=0.1)
    beside = bus.subscribe(
        other, "after_train_iter", name="beside", stall_timeout=0.4
    )  # less than the flush waits
    emit(bus, EVENTS)
    until(lambda: seen)
    bus.emit(AfterVal())
    assert held.entered.wait(DEADLINE)

    def reported() -> bool:
        bus.poll()
        return bool(told)

    until(reported)
    assert not bus.flush(0.5)

    assert [event.handler for event in told] == ["culprit"]
    effect = f"it is no longer waited for. It holds the event loop of other coroutines: {CURE}"
    assert f"on one delivery; {effect}" in told[0].error
    assert "by culprit, for which this is the cure: " in beside.account().error
    assert "more time" not in caplog.text
    assert (beside.account().failed, total(beside.account())) == (0, EVENTS)

    held.let_go()
    assert bus.flush(DEADLINE)
    assert seen == [*range(EVENTS)]
    assert (beside.stats.delivered, beside.stats.error) == (EVENTS, "")
    assert culprit.account().failed == 1


def test_a_close_says_for_whom_the_others_waited(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    """The line about undelivered events has the culprit and the cure for it."""
    bus = Bus(drain_timeout=0.5)

    async def other(event: Any) -> None: ...

    bus.subscribe(held.on_the_loop, "after_val", name="culprit")
    bus.subscribe(other, "after_train_iter", name="beside")
    bus.emit(AfterVal())
    assert held.entered.wait(DEADLINE)
    emit(bus, 3)

    report = bus.close()

    stats = {each.name: each for each in report.stats}
    assert (stats["beside"].queued, stats["beside"].failed) == (3, 0)
    assert "beside (3), its event loop was held for " in caplog.text
    assert f"s by culprit, for which this is the cure: {CURE}" in caplog.text
    assert "by culprit" in str(report)


def test_one_that_awaits_too_long_has_stalled_itself(bus: Bus, held: Held) -> None:
    """A loop that runs is no excuse."""
    slow = bus.subscribe(held.in_a_task, "after_train_iter", stall_timeout=0.1)
    emit(bus, 1)
    until(lambda: slow.account().error.startswith("[stalled]"))

    assert slow.account().failed == 1
    assert "holds the event loop" not in slow.account().error
