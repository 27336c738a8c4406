"""A subscriber with `timed=True` receives the time of each emit, however late its deliveries are."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from time import perf_counter, time
from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, Event, ScalarsLogged, Timed
from tests.conftest import DEADLINE
from tests.support.process_handlers import record_times
from tests.support.process_support import Lines, until

pytest_plugins = "tests.support.process_fixtures"
ROUNDING = 1e-6
"""Seconds by which two Unix times may be off, as floats."""


@pytest.mark.representative(2)
@pytest.mark.parametrize("offload", ["thread", "process"])
@pytest.mark.parametrize(
    "options", [{}, {"overflow": "block"}, {"when": lambda event: True}], ids=["spill", "block", "when"]
)
def test_events_of_one_delivery_have_their_own_times(
    bus: Bus, lines: Lines, offload: str, options: dict[str, Any]
) -> None:
    """The times are as far apart as the emits, by an own clock, though a flush delivers the events together."""
    bus.subscribe(
        record_times, "after_train_iter", offload=offload, batch=True, linger=1000.0, timed=True, **options
    )
    bus.emit(AfterTrainIter())
    bus.flush(DEADLINE)  # later events gather

    clock = []
    for _ in range(2):
        clock.append(perf_counter())
        bus.emit(AfterTrainIter())
        clock.append(perf_counter())
    bus.flush(DEADLINE)

    _, first, second = (float(line.split()[1]) for line in lines())
    assert clock[2] - clock[1] - ROUNDING <= second - first <= clock[3] - clock[0] + ROUNDING
    assert abs(second - time()) < 3600


class Later:
    """Deferred numbers, created as soon as the keeper looks."""

    def ready(self) -> bool:
        return True

    def events(self) -> Iterable[Event]:
        return [ScalarsLogged()]


def test_deferred_events_have_the_time_of_their_creation(bus: Bus) -> None:
    """It is before that of a later emit, even if one delivery has both."""
    seen: list[Timed] = []
    near: list[Event] = []
    bus.subscribe(
        seen.extend,
        "scalars_logged",
        "after_train_iter",
        offload="thread",
        batch=True,
        linger=1000.0,
        timed=True,
    )
    bus.subscribe(near.append, "scalars_logged", offload="thread")  # has its events after the other
    bus.emit(AfterTrainIter())
    bus.flush(DEADLINE)

    bus.post(Later(), ScalarsLogged)
    until(lambda: near)
    bus.emit(AfterTrainIter())
    bus.flush(DEADLINE)

    assert [type(each.event) for each in seen] == [AfterTrainIter, ScalarsLogged, AfterTrainIter]
    assert seen[0].time < seen[1].time < seen[2].time


def test_spilled_events_have_the_time_of_one_before_them(bus: Bus, small_files: Path) -> None:
    """A spill file has no times: none is later than its event or that of the next, and no event is lost."""
    seen: list[Timed] = []
    gate = threading.Event()

    def slow(events: list[Timed]) -> None:
        seen.extend(events)
        gate.wait(DEADLINE)

    subscription = bus.subscribe(slow, "after_train_iter", offload="thread", queue=2, batch=2, timed=True)
    for number in range(20):
        bus.emit(AfterTrainIter(iter=number))
        until(lambda: seen)
    assert subscription.stats.spilled
    gate.set()
    bus.flush(DEADLINE)
    bus.emit(AfterTrainIter(iter=20))
    bus.flush(DEADLINE)

    assert [each.event.iter for each in seen] == [*range(21)]  # type: ignore[attr-defined]
    assert all(after.time - before.time > -ROUNDING for before, after in pairwise(seen))
    assert seen[-2].time < seen[-1].time


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"timed": True}, ValueError, "timed=True delivers lists, and needs batch"),
        ({"timed": 1, "batch": True}, TypeError, "timed must be True or False, got 1"),
    ],
)
def test_bad_options(bus: Bus, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    """Times come in lists of pairs."""
    with pytest.raises(kind, match=message):
        bus.subscribe(lambda events: None, "after_train_iter", offload="thread", **options)
