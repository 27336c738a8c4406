"""A subscriber that lingers gets fewer and larger batches, and none late at a flush or close."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter
from tests.conftest import DEADLINE
from tests.support.process_handlers import record_batch
from tests.support.process_support import Lines, until

pytest_plugins = "tests.support.process_fixtures"
pytestmark = pytest.mark.parametrize("offload", ["thread", "process"])


def lingering(bus: Bus, offload: str, seconds: float) -> Callable[[int], None]:
    """Subscribe `record_batch`; return a function that emits, and waits until another subscriber has the event."""
    bus.subscribe(record_batch, "after_train_iter", offload=offload, name="far", batch=True, linger=seconds)
    seen: list[AfterTrainIter] = []
    bus.subscribe(seen.append, "after_train_iter", offload="thread", name="near")

    def emit(number: int) -> None:
        bus.emit(AfterTrainIter(iter=number))
        until(lambda: any(event.iter == number for event in seen))

    return emit


@pytest.mark.representative(2)
@pytest.mark.parametrize("end", [Bus.flush, Bus.close])
def test_events_after_a_delivery_gather(
    bus: Bus, lines: Lines, offload: str, end: Callable[[Bus, float], object]
) -> None:
    """The first event is delivered at once, the others together at the flush or close, which waits for none."""
    emit = lingering(bus, offload, perf_counter() + 1000.0)  # longer than the machine runs

    emit(0)
    until(lambda: lines() == ["0"])
    for number in (1, 2, 3):
        emit(number)
    end(bus, DEADLINE)

    assert lines() == ["0", "1 2 3"]


def test_the_last_events_need_no_other(bus: Bus, lines: Lines, offload: str) -> None:
    """What has gathered is delivered when its time is over."""
    emit = lingering(bus, offload, 0.05)

    emit(0)
    until(lambda: lines() == ["0"])
    emit(1)

    until(lambda: lines() == ["0", "1"])
