"""What handlers and subscribers cost: distributions, waits, budgets, and the record in a file."""

from __future__ import annotations

import random
import statistics
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import pytest

from eventloop.bus import Bus
from eventloop.costs.records import (
    FILE,
    VERSION,
    HandlerCost,
    Phases,
    RunCosts,
    SubscriberCost,
    Times,
    TrendPoint,
    read_costs,
    write_costs,
)
from eventloop.costs.timing import Budget, Timing
from eventloop.events import AfterTrainIter, Event
from tests.conftest import DEADLINE, Held
from tests.costs.conftest import Clock


def timing_of(seconds: list[float]) -> Timing:
    """A timing of these calls."""
    timing = Timing()
    for s in seconds:
        timing.add(s)
    return timing


def emit(bus: Bus, times: int) -> None:
    """So many iterations."""
    for i in range(times):
        bus.emit(AfterTrainIter(iter=i))


# --- distributions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("scale", [1e-7, 1e-4, 3.0])
def test_a_percentile_is_known_within_5_percent(share: float, scale: float) -> None:
    """Over seven orders of magnitude, against the samples themselves."""
    rng = random.Random(0)
    samples = [scale * rng.lognormvariate(0.0, 1.0) for _ in range(5000)]

    found = timing_of(samples).percentile(share)

    assert found == pytest.approx(statistics.quantiles(samples, n=1000)[round(share * 1000) - 1], rel=0.06)


@pytest.mark.parametrize("seconds", [0.0, -1e-9, 1e-12])
def test_a_clock_that_did_not_move_is_counted(seconds: float) -> None:
    """A call too short for the clock is a sample like any other."""
    assert timing_of([seconds, 1e-6]).times().samples == 2


def test_no_sample_and_one() -> None:
    """Without a sample all is zero; p50, p99 and max of a single call are that call."""
    times = timing_of([0.25]).times()

    assert Timing().times() == Times()
    assert times.max == 0.25
    assert times.p50 == pytest.approx(0.25, rel=0.05)
    assert times.p99 <= times.max


def test_a_histogram_counts_each_call() -> None:
    """In bins of 5 %, by their lower edges, the shortest first."""
    bins = timing_of([0.1, 0.1001, 0.4, 0.2]).histogram()

    assert [count for _, count in bins] == [2, 1, 1]
    assert all(
        edge <= seconds < edge * 1.0501 for (edge, _), seconds in zip(bins, (0.1, 0.2, 0.4), strict=True)
    )
    assert Timing().histogram() == []


def test_a_handlers_record(bus: Bus, clock: Clock) -> None:
    """Name, event, priority, filter, exact calls and seconds, their share of the wall time, and the times."""
    bus.subscribe(lambda event: clock(0.25), "after_train_iter", name="slow", priority=70, every=2)
    emit(bus, 10)

    (cost,) = bus.handler_costs(wall=5.0)

    assert cost == HandlerCost(
        name="slow",
        event="after_train_iter",
        priority=70,
        filter="every=2",
        calls=5,
        seconds=1.25,
        share=0.25,
        times=Times(5, 0.25, cost.times.p50, cost.times.p99, 0.25, cost.times.p90),
    )


def test_each_event_of_a_handler_has_a_record(bus: Bus) -> None:
    """What it costs in one is not what it costs in another; a receiver connected blinker's way has one, too."""

    def receiver(sender: Any, event: Event) -> None:
        pass

    bus.subscribe(lambda event: None, "after_train_iter", "before_train_iter", name="both", budget_us=250)
    bus.signal("after_train_iter").connect(receiver)
    emit(bus, 3)

    assert {(c.name.rsplit(".", 1)[-1], c.event, c.calls, c.budget) for c in bus.handler_costs()} == {
        ("both", "after_train_iter", 3, 250e-6),
        ("both", "before_train_iter", 0, 250e-6),
        ("receiver", "after_train_iter", 3, None),
    }


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_part_of_eventloop_is_built_in(bus: Bus, cancelled: bool) -> None:
    """Functions and methods of its modules, and instances of its classes; yours are not, also when they are cancelled."""

    class Mine(Handled):
        pass

    Handled.__module__ = "eventloop.hooks.handled"
    made = [Handled().handle, Mine().handle, lambda event: None]
    subscriptions = [bus.subscribe(fn, "after_train_iter", name=str(i)) for i, fn in enumerate(made)]
    emit(bus, 1)
    if cancelled:
        for each in subscriptions:
            each.cancel()

    assert {cost.name: cost.built_in for cost in bus.handler_costs()} == {"0": True, "1": False, "2": False}


class Handled:
    """Has a handler."""

    def handle(self, event: Event) -> None:
        pass


# --- waits and deliveries ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", [None, "thread"])
@pytest.mark.parametrize("overflow", ["spill", "block"])
def test_a_subscribers_record(bus: Bus, offload: str | None, overflow: Any) -> None:
    """Its account, the time of its deliveries, and how long events wait from the emit on."""

    async def coroutine(event: Event) -> None:
        pass

    fn: Any = coroutine if offload is None else lambda event: None
    bus.subscribe(fn, "after_train_iter", name="sub", offload=offload, overflow=overflow)
    emit(bus, 200)
    assert bus.flush(10.0)

    (cost,) = bus.subscriber_costs()

    assert (cost.name, cost.runs_on, cost.delivered, cost.calls) == ("sub", offload or "loop", 200, 200)
    assert cost.busy.samples == 200
    assert 0 < cost.busy.max <= cost.seconds
    assert cost.wait.samples >= 1
    assert 0 < cost.wait.p50 <= cost.wait.max


def test_the_wait_includes_the_queue(bus: Bus, held: Held) -> None:
    """An event behind a delivery that lasts waits as long as that."""
    bus.subscribe(held, "after_train_iter", offload="thread")
    began = perf_counter()
    emit(bus, 1)
    assert held.entered.wait(DEADLINE)
    emit(bus, 1)
    threading.Timer(0.05, held.let_go).start()
    assert bus.flush(DEADLINE)

    (cost,) = bus.subscriber_costs()
    assert cost.wait.samples == 2
    assert 0.05 <= cost.wait.max <= perf_counter() - began


# --- budgets -----------------------------------------------------------------------------------------------------


def test_a_background_subscribers_budget_is_in_its_record(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    """In seconds, and whether its deliveries exceeded it, which is logged and reported once, and not held against it."""
    told: list[Any] = []
    busy: Any = lambda event: sum(range(2000))
    for name, budget_us in (("over", 0.5), ("within", 1e8), ("without", None)):
        bus.subscribe(busy, "after_train_iter", name=name, offload="thread", budget_us=budget_us)
    bus.subscribe(told.append, "slow_handler", offload="thread")
    emit(bus, 100)

    assert bus.flush(DEADLINE)
    assert [(c.name, c.budget, c.over_budget) for c in bus.subscriber_costs()][:3] == [
        ("over", 0.5e-6, True),
        ("within", 100.0, False),
        ("without", None, False),
    ]
    assert bus.close(DEADLINE)
    assert [event.handler for event in told] == ["over"]
    assert sum("exceeds its budget_us=0.5" in message for message in caplog.messages) == 1
    assert bus.stats()[0].delivered == 100


@pytest.mark.parametrize(
    ("budget_us", "message"),
    [
        (0, "mine: budget_us, in microseconds, must be above 0, got"),
        (float("nan"), "mine: budget_us, in microseconds, must be a finite number, got"),
        (float("inf"), "mine: budget_us, in microseconds, must be a finite number, got"),
        ("50", "budget_us, in microseconds, must be a number, got"),
        (True, "budget_us, in microseconds, must be a number, got"),
    ],
)
def test_a_bad_budget_is_refused(bus: Bus, budget_us: Any, message: str) -> None:
    """At the line that asked for it."""
    with pytest.raises((TypeError, ValueError), match=message):
        bus.subscribe(lambda event: None, "after_train_iter", name="mine", budget_us=budget_us)


def test_a_budget_warns_once() -> None:
    """`exceeded` is called at the third slow call, and at no later one."""
    told: list[float] = []
    timing = Timing()
    timing.budget = Budget(0.001, told.append)
    for _ in range(100):
        timing.add(0.002)

    assert told == [pytest.approx(0.002, rel=0.05)]


# --- the file ----------------------------------------------------------------------------------------------------

COSTS = RunCosts(
    phases=Phases(iterations=2, data=0.5, hooks=0.25),
    trend=[TrendPoint(first_iter=0, phases=Phases(iterations=2))],
    handlers=[HandlerCost(name="a", event="b", priority=1, calls=2, seconds=0.1, share=0.5, times=Times())],
    subscribers=[
        SubscriberCost(
            name="c",
            event="b",
            runs_on="thread",
            delivered=1,
            dropped=0,
            failed=0,
            queued=0,
            peak_queued=1,
            spilled=0,
            calls=1,
            seconds=0.1,
            wait=Times(),
            busy=Times(),
            budget=0.2,
            over_budget=True,
        )
    ],
    complete=True,
)


def test_the_file_gives_back_what_was_written(tmp_path: Path) -> None:
    """All of it, and nothing else is left in the directory."""
    write_costs(tmp_path, RunCosts())
    write_costs(tmp_path, COSTS)

    assert read_costs(tmp_path) == COSTS
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_file_of_before_budgets_of_subscribers_is_read(tmp_path: Path) -> None:
    """They had none that was written."""
    record = msgspec.to_builtins(COSTS)
    for field in ("budget", "over_budget"):
        del record["subscribers"][0][field]
    (tmp_path / FILE).write_bytes(msgspec.json.encode(record))

    (subscriber,) = read_costs(tmp_path).subscribers

    assert (subscriber.name, subscriber.budget, subscriber.over_budget) == ("c", None, False)


def test_a_file_of_before_histograms_is_read(tmp_path: Path) -> None:
    """Nor had its handlers the mark of those that are built in."""
    record = msgspec.to_builtins(COSTS)
    del record["histogram"], record["handlers"][0]["built_in"]
    (tmp_path / FILE).write_bytes(msgspec.json.encode(record))

    read = read_costs(tmp_path)

    assert (read.histogram, read.handlers[0].built_in) == ([], False)


def test_the_histogram_is_kept(tmp_path: Path) -> None:
    """With its counts, which are refused if they are none."""
    write_costs(tmp_path, msgspec.structs.replace(COSTS, histogram=[(0.5, 2), (0.75, 1)]))
    assert read_costs(tmp_path).histogram == [(0.5, 2), (0.75, 1)]

    write_costs(tmp_path, msgspec.structs.replace(COSTS, histogram=[(0.5, -2)]))
    with pytest.raises(ValueError, match=r"costs\.json is not a cost record: histogram -2 cannot be a count"):
        read_costs(tmp_path)


@pytest.mark.parametrize("kept", [0, 1, 40, -3])
def test_a_torn_file_is_refused(tmp_path: Path, kept: int) -> None:
    """Whatever is left of it; a file that is not there is a FileNotFoundError."""
    with pytest.raises(FileNotFoundError, match=FILE):
        read_costs(tmp_path)
    write_costs(tmp_path, COSTS)
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data[:kept])

    with pytest.raises(ValueError, match="is truncated or not a cost record"):
        read_costs(tmp_path)


def test_a_newer_file_is_refused(tmp_path: Path) -> None:
    """With both versions, also if its fields are others."""
    (tmp_path / FILE).write_bytes(msgspec.json.encode({"version": VERSION + 1, "phases": "elsewhere"}))

    with pytest.raises(ValueError, match=f"has version {VERSION + 1}, newer than this eventloop reads"):
        read_costs(tmp_path)
