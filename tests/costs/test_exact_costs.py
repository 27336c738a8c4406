"""Each call of a handler is clocked, except in a tight loop, whose rows say that they are estimates."""

from __future__ import annotations

import logging
import random
import threading

import pytest

from eventloop.bus import Bus
from eventloop.costs.sampling import ALWAYS_SECONDS, PERIODS, WINDOW
from eventloop.events import AfterTrainIter, Event, SlowHandler
from tests.costs.conftest import Clock

TIGHT = 1e-6
"""The time of an event in a loop that does nothing else, in seconds."""


def emit(bus: Bus, events: int, clock: Clock, step: float, *, first: int = 0) -> None:
    """Emit iterations that are `step` seconds apart, beside the time of their handlers."""
    for i in range(first, first + events):
        clock(step)
        bus.emit(AfterTrainIter(iter=i))


@pytest.mark.representative(2)
@pytest.mark.parametrize("step", [TIGHT, 2e-5, ALWAYS_SECONDS, 0.01])
@pytest.mark.parametrize("every", [1, 10, 20, 50, 100])
def test_a_handler_that_works_now_and_then_has_its_true_cost(
    bus: Bus, clock: Clock, every: int, step: float
) -> None:
    """In 1 of 1 to 100 iterations, at every phase, the account of a run of 440 is the truth, and heads the table."""
    for phase in range(every):
        truth, own = 0.0, Bus()

        def work(event: AfterTrainIter, phase: int = phase) -> None:
            nonlocal truth
            if event.iter % every == phase:
                truth += 0.82e-3
                clock(0.82e-3)

        own.subscribe(work, "after_train_iter", name="work")
        own.subscribe(lambda event: clock(2e-6), "after_train_iter", name="other")
        emit(own, 440, clock, step)

        first, _ = sorted(own.handler_costs(), key=lambda cost: -cost.seconds)
        assert (first.name, first.calls, first.times.samples) == ("work", 440, 440)
        assert first.seconds == pytest.approx(truth, rel=1e-3)
        assert first.times.max == pytest.approx(0.82e-3)
        assert not first.estimated


def test_every_call_of_a_training_loop_is_clocked(bus: Bus, clock: Clock) -> None:
    """However many handlers there are, from 0.3 ms between two events on."""
    for i in range(50):
        bus.subscribe(lambda event: None, "after_train_iter", name=f"{i}")

    emit(bus, 3000, clock, 1.001 * ALWAYS_SECONDS)

    assert {(cost.calls, cost.times.samples, cost.estimated) for cost in bus.handler_costs()} == {
        (3000, 3000, False)
    }


@pytest.mark.parametrize(("handlers", "step", "clocked"), [(1, 75e-6, True), (3, 75e-6, False)])
def test_the_clock_may_take_a_part_in_300(
    bus: Bus, clock: Clock, handlers: int, step: float, clocked: bool
) -> None:
    """Below that distance of two events all are clocked: it depends on the time, and not on the count."""
    for i in range(handlers):
        bus.subscribe(lambda event: None, "after_train_iter", name=f"{i}")

    emit(bus, 5000, clock, step)

    assert all((cost.times.samples == 5000) == clocked for cost in bus.handler_costs())


def test_a_tight_loop_is_sampled_and_says_so(bus: Bus, clock: Clock) -> None:
    """The calls stay exact, the time is that of one call in some hundred."""
    rng = random.Random(0)
    bus.subscribe(lambda event: clock(rng.uniform(1e-6, 3e-6)), "after_train_iter")

    emit(bus, 100_000, clock, TIGHT)

    (cost,) = bus.handler_costs()
    assert (cost.calls, cost.estimated) == (100_000, True)
    assert WINDOW + 100_000 / PERIODS[-1] < cost.times.samples < WINDOW + 100_000 / 50
    assert cost.seconds == pytest.approx(0.2, rel=0.03)
    assert cost.times.mean == pytest.approx(2e-6, rel=0.03)


def test_a_loop_that_becomes_slow_is_clocked_again(bus: Bus, clock: Clock) -> None:
    """Within two periods."""
    bus.subscribe(lambda event: clock(1e-6), "after_train_iter")
    emit(bus, 2000, clock, TIGHT)
    (before,) = bus.handler_costs()
    emit(bus, 1000, clock, 1e-3, first=2000)
    (after,) = bus.handler_costs()

    assert after.times.samples - before.times.samples > 1000 - 3 * PERIODS[-1]


def test_a_single_pause_changes_no_sampling(clock: Clock) -> None:
    """As many calls of a tight loop are clocked with a pause of a second in it as without, or one more."""
    samples = []
    for pause in (0.0, 1.0):
        with Bus() as bus:
            bus.subscribe(lambda event: clock(1e-6), "after_train_iter")
            emit(bus, 1000, clock, TIGHT)
            clock(pause)
            emit(bus, 1000, clock, TIGHT, first=1000)
            samples.append(bus.handler_costs()[0].times.samples)

    assert samples[0] <= samples[1] <= samples[0] + 1


def test_a_loop_of_exact_calls_beside_sampled_ones_adds_up(bus: Bus, clock: Clock) -> None:
    """Slow calls that were clocked stand for themselves, and not for those of a tight loop after them."""
    bus.subscribe(lambda event: clock(1e-3 if event.iter < 500 else 1e-6), "after_train_iter")
    emit(bus, 500, clock, 1e-3)
    emit(bus, 50_000, clock, TIGHT, first=500)

    (cost,) = bus.handler_costs()

    assert cost.estimated
    assert cost.seconds == pytest.approx(0.5 + 50_000e-6, rel=0.02)


def test_a_filtered_handler_is_clocked_in_a_tight_loop_too(bus: Bus, clock: Clock) -> None:
    """Each of its calls stands for itself."""
    bus.subscribe(lambda event: clock(event.iter * 1e-9), "after_train_iter", every=3)

    emit(bus, 9000, clock, TIGHT)

    (cost,) = bus.handler_costs()
    assert cost.seconds == pytest.approx(sum(range(2, 9000, 3)) * 1e-9)
    assert (cost.times.samples, cost.estimated) == (cost.calls, False)


@pytest.mark.parametrize("every", [1, 10, 100])
def test_reading_the_account_changes_nothing(bus: Bus, clock: Clock, every: int) -> None:
    """However often it is read, each call is in it."""
    bus.subscribe(lambda event: clock(1e-3), "after_train_iter")

    for i in range(1000):
        emit(bus, 1, clock, 1e-3, first=i)
        if not i % every:
            bus.stats()

    (cost,) = bus.handler_costs()
    assert cost.times.samples == 1000
    assert cost.seconds == pytest.approx(1.0)


def test_a_call_that_raises_is_clocked(bus: Bus, clock: Clock) -> None:
    """The time until the error belongs to the handler."""

    def fails(event: Event) -> None:
        clock(0.5)
        raise KeyError("lost")

    bus.subscribe(fails, "after_train_iter")
    for _ in range(3):
        with pytest.raises(KeyError):
            bus.emit(AfterTrainIter())

    (cost,) = bus.handler_costs()
    assert (cost.calls, cost.seconds) == (3, 1.5)


def test_a_handler_that_ran_once_is_in_the_record(bus: Bus, clock: Clock) -> None:
    """It is off the bus, and its cost is not forgotten."""
    bus.subscribe(lambda event: clock(0.3), "after_train_iter", name="once", once=True)
    gone = bus.subscribe(lambda event: clock(0.1), "after_train_iter", name="gone")
    for _ in range(2):
        bus.emit(AfterTrainIter())
    gone.cancel()

    costs = {cost.name: (cost.calls, round(cost.seconds, 6)) for cost in bus.handler_costs()}

    assert costs == {"once": (1, 0.3), "gone": (2, 0.2)}


# --- budgets -----------------------------------------------------------------------------------------------------


def test_a_budget_sees_each_call(bus: Bus, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """40 ms in 1 of 50 calls exceeds a budget of 500 us at the third of them, with one warning and one event."""
    told: list[SlowHandler] = []
    bus.subscribe(told.append, "slow_handler")
    bus.subscribe(
        lambda event: clock(0.04 if event.iter % 50 == 7 else 1e-6),
        "after_train_iter",
        name="slow",
        budget_us=500,
    )

    with caplog.at_level(logging.WARNING, "eventloop"):
        emit(bus, 1000, clock, 1e-3)
    bus.poll()

    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "handler slow exceeds its budget_us=500 on after_train_iter: the p99 of its calls is"
    )
    assert [(event.handler, event.count) for event in told] == [("slow", 108)]
    assert told[0].cost == pytest.approx(0.04, rel=0.05)


@pytest.mark.parametrize("slow_calls", [{0}, {0, 5}, {5, 9}])
def test_single_slow_calls_are_no_p99(
    bus: Bus, clock: Clock, caplog: pytest.LogCaptureFixture, slow_calls: set[int]
) -> None:
    """The first call pays for set-up, and two of sixty may have been interrupted."""
    bus.subscribe(
        lambda event: clock(1.0 if event.iter in slow_calls else 1e-6), "after_train_iter", budget_us=500
    )

    emit(bus, 1000, clock, 1e-3)

    assert not caplog.records


def test_a_budget_of_several_events_is_told_once(
    bus: Bus, clock: Clock, caplog: pytest.LogCaptureFixture
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


def test_no_call_is_lost_or_counted_twice_by_a_reader_on_another_thread(bus: Bus, clock: Clock) -> None:
    """All calls and seconds are there at the end, however often the account was read meanwhile."""
    bus.subscribe(lambda event: clock(1e-3), "after_train_iter")
    over, reads = threading.Event(), 0

    def read() -> None:
        nonlocal reads
        while not over.is_set():
            bus.handler_costs()
            reads += 1

    reader = threading.Thread(target=read)
    reader.start()
    emit(bus, 20_000, clock, 1e-3)
    over.set()
    reader.join()

    (cost,) = bus.handler_costs()
    assert reads > 10
    assert (cost.calls, cost.times.samples) == (20_000, 20_000)
    assert cost.seconds == pytest.approx(20.0)
