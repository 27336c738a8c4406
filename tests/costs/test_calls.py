"""Calls of synchronous handlers are counted exactly, whether they are clocked or not."""

from __future__ import annotations

import pytest

from eventloop.bus import Bus
from eventloop.costs.sampling import PERIODS, WINDOW
from eventloop.events import AfterTrainIter, AfterVal, Event

EDGES = [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + PERIODS[-1], WINDOW + PERIODS[-1] + 1, 1279]
"""Events in a tight loop, of which some are clocked."""


def nothing(event: Event) -> None:
    pass


def emit(bus: Bus, times: int) -> None:
    event = AfterTrainIter()
    for _ in range(times):
        bus.emit(event)


@pytest.mark.parametrize("emits", EDGES)
def test_calls_are_exact(bus: Bus, emits: int) -> None:
    """`calls` of an unfiltered handler is the number of emits; reading the account loses no count."""
    subscription = bus.subscribe(nothing, "after_train_iter")

    for lap in range(1, 4):
        emit(bus, emits)
        assert subscription.stats.calls == subscription.stats.delivered == lap * emits
    assert bus.signal("after_train_iter").emitted == 3 * emits


@pytest.mark.parametrize("emits", EDGES)
def test_calls_stay_exact_when_others_come_and_go(bus: Bus, emits: int) -> None:
    """Each subscription counts the emits of its own lifetime."""
    first = bus.subscribe(nothing, "after_train_iter", name="first")
    emit(bus, emits)
    second = bus.subscribe(nothing, "after_train_iter", name="second")
    emit(bus, emits + 1)
    first.cancel()
    emit(bus, emits + 2)

    assert first.stats.calls == 2 * emits + 1
    assert second.stats.calls == 2 * emits + 3


@pytest.mark.parametrize("depth", [1, 70])
def test_calls_are_exact_under_nested_emits(bus: Bus, depth: int) -> None:
    """A handler that emits its own event is counted at each level."""

    def recurse(event: AfterTrainIter) -> None:
        if event.iter:
            bus.emit(AfterTrainIter(iter=event.iter - 1))

    subscription = bus.subscribe(recurse, "after_train_iter")
    for _ in range(5):
        bus.emit(AfterTrainIter(iter=depth))

    assert subscription.stats.calls == 5 * (depth + 1)


def test_calls_are_exact_when_a_handler_reads_the_account(bus: Bus) -> None:
    """`stats` inside a handler counts the emit under way."""
    counts: list[int] = []
    bus.subscribe(lambda event: counts.append(bus.stats()[0].calls), "after_train_iter")

    emit(bus, 200)

    assert counts == list(range(1, 201))


def test_a_raising_handler_is_counted(bus: Bus) -> None:
    """A call that raised was a call, measured or not."""

    def raises(event: Event) -> None:
        raise KeyError

    subscription = bus.subscribe(raises, "after_train_iter")
    for _ in range(200):
        with pytest.raises(KeyError):
            bus.emit(AfterTrainIter())

    assert subscription.stats.calls == 200


def test_stats_are_in_order_of_registration(bus: Bus) -> None:
    """One record a subscription, by its name, whatever its priority; two events of one add up."""
    bus.subscribe(nothing, "after_val", "after_train_iter", name="b", priority=90)
    bus.subscribe(nothing, "*", name="a", priority=10)
    emit(bus, 100)
    bus.emit(AfterVal())

    assert [(record.name, record.event, record.calls) for record in bus.stats()] == [
        ("b", "after_val, after_train_iter", 101),
        ("a", "*", 101),
    ]
