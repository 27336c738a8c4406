"""The trend of each handler: exact, of equally many iterations a point, and as many points as the run's trend allows."""

from __future__ import annotations

import threading

import pytest

from eventloop.bus import Bus
from eventloop.costs.handler_trend import POINTS, HandlerTrend
from eventloop.costs.records import HANDLER_POINT, HandlerCost
from eventloop.costs.step_clock import StepClock
from eventloop.events import AfterTrainEpoch, AfterTrainIter
from tests.costs.conftest import Clock

STEP = 1e-3


def run(bus: Bus, step_clock: StepClock, clock: Clock, iterations: range) -> None:
    """Iterations of a millisecond that emit their event."""
    for i in iterations:
        step_clock.end_data()
        step_clock.begin_forward()
        step_clock.end_forward()
        clock(STEP)
        bus.emit(AfterTrainIter(iter=i))
        step_clock.end()


@pytest.fixture
def step_clock(bus: Bus, clock: Clock) -> StepClock:
    """The clock of a run that has begun."""
    made = StepClock()
    made.begin_run(0, None, bus.signal)
    return made


def cost(bus: Bus, step_clock: StepClock, name: str) -> HandlerCost:
    """The record of one handler."""
    return next(each for each in bus.handler_costs(1.0, step_clock.handlers) if each.name == name)


@pytest.mark.parametrize("iterations", [1, 4, 150, 511, 512, 513, 5000])
def test_each_point_has_the_seconds_of_its_iterations(
    iterations: int, bus: Bus, step_clock: StepClock, clock: Clock
) -> None:
    """Each point covers as many points of the run's trend, and its seconds are those of the calls in them."""
    spent: list[float] = []

    def work(event: AfterTrainIter) -> None:
        spent.append(1e-6 * (event.iter % 7))
        clock(spent[-1])

    bus.subscribe(work, "after_train_iter", name="work")
    run(bus, step_clock, clock, range(iterations))

    found, whole = cost(bus, step_clock, "work"), step_clock.trend
    lengths = [point.phases.iterations for point in whole]
    ends = [sum(lengths[:i]) for i in range(HANDLER_POINT, len(lengths) + 1, HANDLER_POINT)]
    expected = [sum(spent[a:b]) for a, b in zip([0, *ends], [*ends, iterations], strict=True)]
    assert found.trend == pytest.approx(expected, abs=1e-9)
    assert sum(found.trend) == pytest.approx(found.seconds, abs=1e-9 * POINTS)
    assert len(found.trend) <= POINTS


def test_a_handler_that_comes_late_and_goes_early(bus: Bus, step_clock: StepClock, clock: Clock) -> None:
    """It took nothing before and after; its points stay beside those of the run."""
    run(bus, step_clock, clock, range(8))
    subscription = bus.subscribe(lambda event: clock(1e-6), "after_train_iter", name="guest")
    run(bus, step_clock, clock, range(8, 16))
    subscription.cancel()
    run(bus, step_clock, clock, range(16, 24))

    assert cost(bus, step_clock, "guest").trend == [0.0, 0.0, 4e-6, 4e-6, 0.0, 0.0, 0.0]


def test_a_mark_never_waits_for_a_reader(bus: Bus, step_clock: StepClock, clock: Clock) -> None:
    """While another thread reads the times, the point goes to the next one, and nothing is lost."""
    bus.subscribe(lambda event: clock(1e-6), "after_train_iter", name="read")
    (handler,) = bus.signal("after_train_iter").handlers
    reads, done = threading.Event(), threading.Event()

    def read() -> None:
        with handler.timing._lock:
            reads.set()
            done.wait()

    reader = threading.Thread(target=read)
    reader.start()
    reads.wait()
    run(bus, step_clock, clock, range(4))
    done.set()
    reader.join()
    run(bus, step_clock, clock, range(4, 12))

    assert cost(bus, step_clock, "read").trend == [0.0, 8e-6, 4e-6, 0.0]


def test_no_trend_outside_of_iterations_and_of_estimates(
    bus: Bus, step_clock: StepClock, clock: Clock
) -> None:
    """A handler of an epoch has no seconds an iteration; in a tight loop not all calls were clocked."""
    bus.subscribe(lambda event: clock(1e-6), "after_train_epoch", name="outside")
    bus.subscribe(lambda event: None, "after_train_iter", name="estimated")
    bus.emit(AfterTrainEpoch(epoch=0))
    for i in range(1000):
        clock(1e-6)
        bus.emit(AfterTrainIter(iter=i))
    run(bus, step_clock, clock, range(1000, 1008))

    assert cost(bus, step_clock, "estimated").estimated
    assert cost(bus, step_clock, "estimated").trend == cost(bus, step_clock, "outside").trend == []


def test_without_a_clock_there_is_no_trend(bus: Bus, clock: Clock) -> None:
    """A bus of its own has no iterations."""
    bus.subscribe(lambda event: None, "after_train_iter", name="alone")
    bus.emit(AfterTrainIter(iter=0))

    assert [each.trend for each in bus.handler_costs()] == [[]]
    assert HandlerTrend(bus.signal).of(bus.signal("after_train_iter").handlers[0].timing, 0.5) == [0.5]
