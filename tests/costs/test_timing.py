"""Sampled durations stand for the calls that were not measured, each for as many as it is one of."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from eventloop.bus import Bus
from eventloop.bus import handler as handler_module
from eventloop.costs.counting import LAPS, PERIODS, WARM_UP, Ticker
from eventloop.costs.sampling import Timing, Waits
from eventloop.events import AfterTrainIter, Event


def sampled(durations: Iterator[float], calls: int) -> tuple[Timing, list[float]]:
    """What a plan would have measured of so many calls, and what all of them took."""
    ticker, timing, all_of_them = Ticker(), Timing(), []
    for seconds, tick in zip(islice(durations, calls), ticker.ticks, strict=False):
        all_of_them.append(seconds)
        if tick:
            ticker.measured += 1
            timing.add(seconds, ticker.weight)
    return timing, all_of_them


def test_the_weights_of_all_samples_are_all_events() -> None:
    """Each sample of a stage is one of its period."""
    ticker, weights = Ticker(), 0
    for tick in islice(ticker.ticks, WARM_UP + LAPS * sum(PERIODS)):
        ticker.measured += tick
        weights += ticker.weight if tick else 0

    assert weights == WARM_UP + LAPS * sum(PERIODS)


@pytest.mark.parametrize("calls", [100, 500, 2000, 50_000])
def test_a_slow_beginning_stands_for_itself(calls: int) -> None:
    """Thirty slow calls at the start are thirty slow calls, however long the run."""
    durations = iter([1e-3] * 30 + [1e-6] * calls)

    timing, took = sampled(durations, calls)

    assert timing.estimate(calls) == pytest.approx(sum(took), rel=0.02)


@pytest.mark.parametrize("calls", [500, 5000])
def test_one_call_that_was_interrupted_stands_for_itself(calls: int) -> None:
    """In the warm-up, where it was measured."""
    durations = iter([1e-6] * 40 + [0.03] + [1e-6] * calls)

    timing, took = sampled(durations, calls)

    assert timing.estimate(calls) == pytest.approx(sum(took), rel=0.02)
    assert timing.percentile(0.99) == pytest.approx(1e-6, rel=0.05)
    assert timing.longest == 0.03


@pytest.mark.parametrize("calls", [5000, 50_000, 500_000])
def test_work_that_begins_later_is_seen(calls: int) -> None:
    """Calls that are cheap in the warm-up and dear afterwards are estimated by the later ones."""
    rng = random.Random(1)
    durations = iter([1e-6] * 100 + [1e-3 * rng.uniform(0.5, 1.5) for _ in range(calls)])

    timing, took = sampled(durations, calls)

    assert timing.estimate(calls) == pytest.approx(sum(took), rel=0.1)
    assert timing.percentile(0.5) == pytest.approx(1e-3, rel=0.1)


def test_the_first_call_is_no_percentile() -> None:
    """It pays for set-up; it is in the total, and it may be the longest."""
    timing = Timing()
    for seconds in (0.2, *[6e-5] * 7):
        timing.add(seconds)

    assert timing.percentile(0.99) == pytest.approx(6e-5, rel=0.05)
    assert timing.longest == 0.2
    assert timing.estimate(8) == pytest.approx(0.2 + 7 * 6e-5)


def test_the_mean_times_the_calls_is_the_total() -> None:
    """The record is of one piece."""
    timing, _ = sampled(iter([1e-3] * 10 + [1e-6] * 990), 1000)

    assert timing.times(1000).mean * 1000 == pytest.approx(timing.estimate(1000))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Replaces the clock of handlers by one that stands still; call it to let seconds pass."""
    now = [0.0]
    monkeypatch.setattr(handler_module, "perf_counter", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


@pytest.mark.parametrize("every", [1, 10, 100])
def test_who_looks_often_sees_as_much(bus: Bus, clock: Callable[[float], None], every: int) -> None:
    """Reading the account settles the plan, and does not hold up the next sample."""
    bus.subscribe(lambda event: clock(1e-3 if event.iter >= 100 else 1e-6), "after_train_iter")

    for i in range(3000):
        bus.emit(AfterTrainIter(iter=i))
        if not i % every:
            bus.stats()

    (cost,) = bus.handler_costs()
    second = WARM_UP + LAPS * PERIODS[0]
    assert cost.times.samples == WARM_UP + LAPS + (3000 - second) // PERIODS[1]
    assert cost.seconds == pytest.approx(2.9, rel=0.02)


def test_a_handler_of_every_eighth_event_is_always_timed(bus: Bus, clock: Callable[[float], None]) -> None:
    """Each of its calls stands for itself."""
    bus.subscribe(lambda event: clock(event.iter * 1e-6), "after_train_iter", every=100)

    for i in range(2000):
        bus.emit(AfterTrainIter(iter=i))

    (cost,) = bus.handler_costs()
    assert cost.seconds == pytest.approx(sum(range(99, 2000, 100)) * 1e-6)
    assert cost.times.samples == cost.calls == 20


def test_a_handler_that_ran_once_is_in_the_record(bus: Bus, clock: Callable[[float], None]) -> None:
    """It is off the bus, and what it cost is not forgotten."""
    bus.subscribe(lambda event: clock(0.3), "after_train_iter", name="once", once=True)
    gone = bus.subscribe(lambda event: clock(0.1), "after_train_iter", name="gone")
    for _ in range(2):
        bus.emit(AfterTrainIter())
    gone.cancel()

    costs = {cost.name: (cost.calls, round(cost.seconds, 6)) for cost in bus.handler_costs()}

    assert costs == {"once": (1, 0.3), "gone": (2, 0.2)}


def test_a_budget_of_several_events_is_told_once(
    bus: Bus, clock: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    """One subscription, one warning."""
    bus.subscribe(
        lambda event: clock(0.001), "after_train_iter", "before_train_iter", name="slow", budget_us=500
    )

    for _ in range(100):
        bus.emit(AfterTrainIter())
        bus.signal("before_train_iter").emit(Event())

    assert len([r for r in caplog.records if "slow exceeds its budget_us=500" in r.getMessage()]) == 1
    assert all(cost.over_budget for cost in bus.handler_costs())


def test_every_stamped_wait_is_followed() -> None:
    """Of a burst not only the first, which waits least."""
    waits = Waits()
    for i in range(200):
        waits.begin(0.0, ahead=i)
    for i in range(200):
        waits.taken(1, 0.02 * (i + 1))

    times = waits.timing.times()
    assert times.samples == 200
    assert times.p50 == pytest.approx(2.0, rel=0.06)
    assert times.p99 == pytest.approx(4.0, rel=0.06)


def test_a_followed_event_stands_for_those_since_the_last() -> None:
    """A sparse sample of a queue that grows is not drowned by a dense one of its beginning."""
    waits = Waits()
    for i in [*range(64), *range(127, 12_700, 127)]:
        waits.begin(0.0, ahead=i)
    waits.taken(64, 0.001)
    waits.taken(12_700, 1.0)

    assert waits.timing.percentile(0.5) == pytest.approx(1.0, rel=0.06)
    assert waits.timing.times().mean == pytest.approx(1.0, rel=0.02)


def test_the_events_that_are_followed_are_bounded() -> None:
    """A queue of a million costs no more."""
    waits = Waits()
    for i in range(100_000):
        waits.begin(0.0, ahead=i)

    assert len(waits._followed) == Waits.FOLLOWED
