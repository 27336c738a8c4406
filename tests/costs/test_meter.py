"""What handlers cost: call counts are exact, times are sampled."""

from __future__ import annotations

import sys

import pytest

from eventloop.bus import Bus
from eventloop.costs.counting import LAPS, PERIODS, WARM_UP, Ticker
from eventloop.costs.sampling import Timing
from eventloop.events import AfterTrainIter, AfterVal, Event

EDGES = [0, 1, 63, 64, 65, 80, 81, 82, 190, 318, 1000, 1152, 1279]
SECOND = WARM_UP + LAPS * PERIODS[0]
THIRD = SECOND + LAPS * PERIODS[1]
FOURTH = THIRD + LAPS * PERIODS[2]
"""Events until a longer period begins, and well within the longest."""


def nothing(event: Event) -> None:
    pass


def emit(bus: Bus, times: int) -> None:
    event = AfterTrainIter()
    for _ in range(times):
        bus.emit(event)


@pytest.mark.slow
@pytest.mark.parametrize(
    "draws",
    [
        *EDGES,
        *(first + n for first in (SECOND, THIRD, FOURTH) for n in (-1, 0, 1, *PERIODS, 126, 128, 1020, 5000)),
    ],
)
@pytest.mark.parametrize("since", [0, PERIODS[0] - 1])
@pytest.mark.parametrize(
    "before", [0, 1, WARM_UP, *(WARM_UP + n * LAPS + 1 for n in range(4)), WARM_UP + LAPS, 10_000]
)
def test_ticker_counts_its_draws(draws: int, before: int, since: int) -> None:
    """Across warm-up and laps `settle` is the number of draws, to the last one."""
    ticker = Ticker(before, since)
    for _ in range(draws):
        ticker.measured += next(ticker.ticks)

    assert ticker.settle()[0] == draws


def test_a_draw_is_one_step_of_the_interpreter() -> None:
    """Two threads that emit draw from the same ticker: no line of Python is run, in which they might meet."""
    calls: list[str] = []
    ticker = Ticker()
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        for _ in range(FOURTH):
            next(ticker.ticks)
    finally:
        sys.setprofile(None)

    assert "call" not in calls


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 5, 100, 1000])
def test_a_ticker_goes_on_in_the_lap_of_the_one_before(every: int) -> None:
    """However often it is replaced, the same events are measured."""
    alone, chain, before, since = Ticker(), Ticker(), 0, 0
    for i in range(FOURTH + 5000):
        tick = next(chain.ticks)
        chain.measured += tick
        assert tick == next(alone.ticks), i
        if not i % every:
            _, since = chain.settle()
            before += chain.measured
            chain = Ticker(before, since)


@pytest.mark.parametrize(
    ("draws", "measured"),
    [
        (10, 10), (64, 64), (65, 64), (WARM_UP + PERIODS[0] - 1, 64), (WARM_UP + PERIODS[0], 65), (1000, 119),
        (SECOND, 128), (SECOND + PERIODS[1] - 1, 128), (SECOND + PERIODS[1], 129), (SECOND + 5 * PERIODS[1], 133),
        (THIRD, 192), (THIRD + PERIODS[2] - 1, 192), (THIRD + PERIODS[2], 193), (THIRD + 5 * PERIODS[2], 197),
        (FOURTH, 256), (FOURTH + PERIODS[2] - 1, 256), (FOURTH + 3 * PERIODS[2], 259),
    ],
)  # fmt: skip
def test_ticker_measures_the_warm_up_and_then_one_a_period(draws: int, measured: int) -> None:
    """All of the first events are measured, then every 17th, after 64 of those every 127th, and at last every 1021st."""
    ticker = Ticker()

    assert sum(next(ticker.ticks) for _ in range(draws)) == measured


@pytest.mark.parametrize("emits", EDGES)
def test_calls_are_exact(bus: Bus, emits: int) -> None:
    """`calls` of an unfiltered handler is the number of emits."""
    subscription = bus.subscribe(nothing, "after_train_iter")

    emit(bus, emits)

    assert subscription.stats.calls == emits
    assert subscription.stats.delivered == emits


@pytest.mark.parametrize("emits", EDGES)
def test_calls_stay_exact_when_the_account_is_read_in_between(bus: Bus, emits: int) -> None:
    """Reading settles the plan, and loses no count."""
    subscription = bus.subscribe(nothing, "after_train_iter")

    for _ in range(3):
        emit(bus, emits)
        bus.stats()
        bus.stats()

    assert subscription.stats.calls == 3 * emits
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


@pytest.mark.parametrize("every", [2, 7, 8, 100])
def test_calls_of_a_filtered_handler_are_its_firings(bus: Bus, every: int) -> None:
    """What the filter held back is no call."""
    subscription = bus.subscribe(nothing, "after_train_iter", every=every)

    for i in range(1000):
        bus.emit(AfterTrainIter(iter=i))

    assert subscription.stats.calls == 1000 // every


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


def test_calls_of_several_events_add_up(bus: Bus) -> None:
    """A subscription to two events counts both."""
    subscription = bus.subscribe(nothing, "after_train_iter", "after_val")

    emit(bus, 100)
    bus.emit(AfterVal())

    assert subscription.stats.calls == 101
    assert subscription.stats.event == "after_train_iter, after_val"


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
    """One record a subscription, by its name, whatever its priority."""
    bus.subscribe(nothing, "after_val", name="b", priority=90)
    bus.subscribe(nothing, "*", name="a", priority=10)

    assert [(record.name, record.event) for record in bus.stats()] == [("b", "after_val"), ("a", "*")]


def test_time_is_estimated_for_the_calls_that_were_not_measured() -> None:
    """Total = what was measured, and the mean of the steady calls for each of the others."""
    timing = Timing()
    for seconds in (9.0, 1.0, 3.0):  # the first call pays for set-up and stands for itself alone
        timing.add(seconds)

    assert timing.estimate(10) == pytest.approx(13.0 + 7 * 2.0)
    assert timing.longest == 9.0


def test_time_of_a_single_call_is_that_call() -> None:
    """An event that came once has no steady calls to average."""
    timing = Timing()
    timing.add(2.0)

    assert timing.estimate(1) == pytest.approx(2.0)


def test_seconds_are_measured_from_the_first_event(bus: Bus) -> None:
    """An event of which a run sees one still has its cost."""
    subscription = bus.subscribe(lambda event: sum(range(1000)), "after_val")

    bus.emit(AfterVal())

    assert subscription.stats.seconds > 0
