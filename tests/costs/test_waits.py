"""Waits are counted once, for the runs of the thread that waits, and are in no time of a handler."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from eventloop.bus import Bus
from eventloop.costs.foreign_calls import ForeignCalls
from eventloop.costs.records import HandlerCost, Place, WaitCost
from eventloop.costs.step_clock import StepClock
from eventloop.costs.timing import BATCH
from eventloop.costs.waits import waiting
from eventloop.events import AfterBackward, AfterTrainIter, Event
from tests.costs.conftest import Clock
from tests.support.internals import set_clock


@pytest.fixture
def wait(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Wait so many seconds on the clock that stands still."""
    now, advance = [100.0], clock
    set_clock(monkeypatch, lambda: now[0], "waits", "step_clock", "foreign_calls")

    def wait(seconds: float) -> None:
        with waiting("checkpoint"):
            now[0] += seconds
            advance(seconds)

    return wait


def started(bus: Bus) -> StepClock:
    """Return the clock of a run that has begun on this thread."""
    clock = StepClock()
    clock.begin_run(0, None, bus.signal)
    return clock


@pytest.fixture
def run(bus: Bus, wait: Callable[..., None]) -> StepClock:
    """The clock of a run on this thread."""
    return started(bus)


def costs(bus: Bus) -> dict[str, HandlerCost]:
    return {cost.name: cost for cost in bus.handler_costs()}


@pytest.mark.parametrize("every", [1, 2])
def test_a_handler_has_its_time_without_its_waits(
    bus: Bus, clock: Clock, run: StepClock, wait: Callable[..., None], every: int
) -> None:
    """In the sum and in the distribution; those of other calls and handlers are as they were."""

    def work(event: AfterTrainIter) -> None:
        clock(2.0)
        if event.iter == 3:
            wait(50.0)
            wait(7.0)

    bus.subscribe(work, "after_train_iter", name="waits", every=every)
    bus.subscribe(lambda event: clock(1.0), "after_train_iter", name="other")

    for i in range(10):
        bus.emit(AfterTrainIter(iter=i))

    found = costs(bus)
    assert (found["waits"].seconds, found["waits"].times.max) == (2.0 * 10 / every, 2.0)
    assert found["waits"].times.samples == found["waits"].calls == 10 / every
    assert found["other"].seconds == 10.0
    assert run.waits.records() == [WaitCost("checkpoint", "between", "", 2, 57.0, 50.0)]


def test_a_wait_is_taken_out_of_each_handler_around_it(
    bus: Bus, clock: Clock, run: StepClock, wait: Callable[..., None]
) -> None:
    """A handler that emits an event, in whose handler the thread waits, has not worked meanwhile either."""

    def outer(event: Event) -> None:
        clock(1.0)
        bus.emit(AfterBackward())

    def inner(event: Event) -> None:
        clock(2.0)
        wait(50.0)

    bus.subscribe(outer, "after_train_iter", name="outer")
    bus.subscribe(inner, "after_backward", name="inner")
    bus.emit(AfterTrainIter())

    assert {name: cost.seconds for name, cost in costs(bus).items()} == {"outer": 3.0, "inner": 2.0}


def test_the_account_may_be_read_within_a_wait(
    bus: Bus, clock: Clock, run: StepClock, wait: Callable[..., None]
) -> None:
    """Neither the call under way nor its wait is among the measured ones; the reading loses neither."""
    seen: list[tuple[int, float]] = []

    def work(event: AfterTrainIter) -> None:
        wait(50.0)
        times = costs(bus)["waits"].times
        seen.append((times.samples, times.max))
        wait(8.0)
        clock(1.0)

    bus.subscribe(work, "after_train_iter", name="waits")
    for i in range(BATCH + 2):
        bus.emit(AfterTrainIter(iter=i))

    assert seen == [(calls, float(calls > 0)) for calls in range(BATCH + 2)]
    assert costs(bus)["waits"].seconds == BATCH + 2


def test_a_handler_that_fails_has_its_time_without_its_waits(
    bus: Bus, clock: Clock, run: StepClock, wait: Callable[..., None]
) -> None:
    """An error ends the call as a return does."""

    def work(event: Event) -> None:
        clock(1.0)
        wait(50.0)
        raise OSError("full")

    bus.subscribe(work, "after_train_iter", name="waits")
    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            bus.emit(AfterTrainIter())

    assert costs(bus)["waits"].seconds == 2.0


def test_a_budget_does_not_pay_for_waits(
    bus: Bus, clock: Clock, run: StepClock, wait: Callable[..., None]
) -> None:
    """A handler is not slow because it waited; it is if it works for longer than its budget."""
    bus.subscribe(lambda event: wait(50.0), "after_train_iter", name="waits", budget_us=1e6)
    bus.subscribe(lambda event: clock(2.0), "after_train_iter", name="works", budget_us=1e6)

    for i in range(10):
        bus.emit(AfterTrainIter(iter=i))

    assert {name: cost.over_budget for name, cost in costs(bus).items()} == {"waits": False, "works": True}


def test_a_wait_within_a_wait_is_counted_once(run: StepClock, wait: Callable[..., None]) -> None:
    """For the outer one, which the program asked for; an error in it is counted too."""

    def fail() -> None:
        with waiting("background", "writer"):
            wait(3.0)
            raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        fail()

    assert run.waits.records() == [WaitCost("background", "between", "writer", 1, 3.0, 3.0)]
    assert run.waits.seconds == 3.0


def test_a_wait_belongs_to_the_runs_of_its_thread(
    bus: Bus, run: StepClock, wait: Callable[..., None]
) -> None:
    """To that within a handler of another one as well; to none that has ended, or is on another thread."""
    inner = started(bus)
    wait(1.0)
    inner.end_run()
    wait(2.0)
    thread = threading.Thread(target=wait, args=(4.0,))
    thread.start()
    thread.join()
    run.end_run()
    wait(8.0)

    assert (inner.waits.seconds, run.waits.seconds) == (1.0, 3.0)


def test_each_part_of_a_run_has_its_waits(run: StepClock, wait: Callable[..., None]) -> None:
    """The begin of a run, its iterations, an evaluation within and after them, and its end."""
    wait(1.0)
    run.begin_pass()
    run.end_data()
    wait(2.0)
    with run.excluding():
        wait(4.0)
    run.begin_forward()
    run.end_forward()
    run.end()
    run.begin()
    wait(8.0)
    run.end_pass()
    with run.excluding():
        wait(16.0)
    wait(32.0)
    run.end_pass("end")
    wait(64.0)

    found: dict[Place, float] = {each.place: each.seconds for each in run.waits.records()}
    assert found == {"between": 33.0, "iterations": 10.0, "evaluations": 20.0, "end": 64.0}
    assert (run.evaluation_seconds, run.run_seconds) == (0.0, 127.0)
    assert (run.phases.checkpoint, run.phases.wall) == (10.0, 10.0)


def test_a_wait_is_a_phase_of_its_iteration(run: StepClock, clock: Clock, wait: Callable[..., None]) -> None:
    """The phase in which it was spent is without it, and the iteration is as long as it took."""
    run.begin_pass()
    wait(1.0)
    run.end_data()
    wait(2.0)
    run.begin_forward()
    wait(4.0)
    run.end_forward()
    wait(8.0)
    before_its_end = run.phases
    run.end()

    assert (before_its_end.checkpoint, before_its_end.unaccounted) == (15.0, 0.0)
    assert (run.phases.checkpoint, run.phases.wall, run.times.times().max) == (15.0, 15.0, 15.0)
    assert run.phases.data == run.phases.forward == run.phases.hooks == run.phases.unaccounted == 0.0


def test_a_callback_of_another_engine_has_its_time_without_its_waits(
    run: StepClock, wait: Callable[..., None]
) -> None:
    """In its row and in the phases: the step around it keeps its time, and the hooks have that of the callback."""
    calls = ForeignCalls(run.charge)
    callback = calls.measured(lambda: wait(8.0), "Callback.on_batch", "on_batch", in_iteration=True)
    around = calls.measured(callback, "Outer.on_batch", "on_batch", in_iteration=True)
    run.begin_pass()
    run.end_data()
    run.begin_forward()
    around()
    run.end_forward()
    run.end()

    phases = run.phases
    assert [(cost.calls, cost.seconds) for cost in calls.costs(1.0)] == [(1, 0.0)] * 2
    assert (phases.checkpoint, phases.wall) == (8.0, 8.0)
    assert phases.forward == phases.hooks == phases.unaccounted == 0.0
