"""Advice on the costs of a run: right where something is wrong, silent where nothing is."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from eventloop.costs.records import (
    DeviceRead,
    HandlerCost,
    Phases,
    RunCosts,
    SubscriberCost,
    Times,
    TrendPoint,
)
from eventloop.reporting.advice import advice


def phases(iterations: int, **seconds: float) -> Phases:
    """Return the phases of iterations of 10 ms, of which `seconds` replaces some."""
    usual = {"data": 1e-3, "forward": 3e-3, "backward": 4e-3, "optimizer": 1e-3, "hooks": 1e-3} | seconds
    return Phases(iterations=iterations, **{name: each * iterations for name, each in usual.items()})


def handler(
    name: str, seconds: float, calls: int, *, p50: float, longest: float, **facts: Any
) -> HandlerCost:
    """Return the costs of a handler of train iterations."""
    times = Times(samples=calls, mean=seconds / calls, p50=p50, p99=longest, max=longest)
    return HandlerCost(
        name=name,
        event="after_train_iter",
        priority=50,
        calls=calls,
        seconds=seconds,
        share=0.0,
        times=times,
        **facts,
    )


def subscriber(name: str, **facts: Any) -> SubscriberCost:
    """Return the costs of a background subscriber that has written 1,000 events."""
    counts = {"dropped": 0, "failed": 0, "queued": 0, "peak_queued": 9, "spilled": 0, "calls": 1000} | facts
    return SubscriberCost(
        name=name,
        event="*",
        runs_on="thread",
        delivered=1000,
        seconds=2.0,
        wait=Times(),
        busy=Times(1000, 2e-3),
        **counts,
    )


OWN = handler(
    "OptimizerHook.after_train_iter", 5.02, 1000, p50=5e-3, longest=7e-3, includes=["backward", "optimizer"]
)
LOGGER = handler("LoggerHook.after_train_iter", 0.05, 1000, p50=2e-5, longest=1e-3)
HEALTHY = RunCosts(
    seconds=11.0,
    phases=phases(1000),
    trend=[TrendPoint(first_iter=100 * i, phases=phases(100)) for i in range(10)],
    iteration=Times(1000, 10e-3, 10e-3, 12e-3, 15e-3),
    num_workers=2,
    handlers=[OWN, LOGGER],
    subscribers=[subscriber("JSONLWriter")],
    complete=True,
)


def slow_loader(workers: int | None) -> RunCosts:
    """Return the costs of a run that waits 20 of 29 ms for its loader."""
    trend = [TrendPoint(first_iter=100 * i, phases=phases(100, data=20e-3)) for i in range(10)]
    return replace(HEALTHY, phases=phases(1000, data=20e-3), trend=trend, num_workers=workers)


def short_batches(workers: int) -> RunCosts:
    """Return the costs of a run that waits 1.5 of 2 ms for its loader."""
    spent = {"data": 1.5e-3, "forward": 0.5e-3, "backward": 0.0, "optimizer": 0.0, "hooks": 0.0}
    trend = [TrendPoint(first_iter=100 * i, phases=phases(100, **spent)) for i in range(10)]
    return replace(
        HEALTHY,
        phases=phases(1000, **spent),
        trend=trend,
        num_workers=workers,
        handlers=[],
        iteration=Times(),
    )


def with_tail(*handlers: HandlerCost) -> RunCosts:
    """Return the costs of a run in which 1 of 100 iterations takes 60 ms."""
    return replace(
        HEALTHY, iteration=Times(1000, 11e-3, 10e-3, 60e-3, 80e-3), handlers=[OWN, LOGGER, *handlers]
    )


DRAW = handler("draw", 2.0, 1000, p50=1e-6, longest=100e-3)
EACH = handler("draw", 2.0, 1000, p50=2e-3, longest=3e-3)
SAVE = handler("CheckpointHook.after_train_iter", 0.5, 1000, p50=1e-6, longest=50e-3)
SHOW = handler("show", 3.2, 1000, p50=3.2e-3, longest=4e-3)
WAITS = DeviceRead("show", "train.py:24", 1000, 3.0)
SLOW_START = [TrendPoint(first_iter=0, phases=phases(1, forward=6.0)), *HEALTHY.trend]


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (
            slow_loader(0),
            [
                "the loader",
                "69.0 % of the median iteration, 29.0 ms, waits",
                "num_workers=0",
                "worker processes",
            ],
        ),
        (slow_loader(2), ["the loader", "69.0 %", "num_workers=2", "more of them"]),
        (
            short_batches(0),
            [
                "the loader",
                "75.0 % of the median iteration, 2.00 ms, waits",
                "use larger batches, or a loader that indexes tensors",
            ],
        ),
        (short_batches(2), ["the loader", "use larger batches"]),
        (slow_loader(None), ["the loader", "69.0 %", "load ahead"]),
        (replace(HEALTHY, handlers=[OWN, DRAW]), ["draw takes 20.0 %", "100 ms in 1 of 50 calls", "every="]),
        (
            replace(HEALTHY, handlers=[OWN, EACH]),
            ["draw takes 20.0 %", "2.00 ms in each call", 'offload="process"'],
        ),
        (
            replace(HEALTHY, handlers=[OWN, replace(EACH, times=Times())]),
            ["draw takes 20.0 %", "2.00 ms in each call"],
        ),
        (
            replace(HEALTHY, reads=[WAITS]),
            [
                "show (train.py:24) waits for the device in each iteration",
                "3.00 ms each",
                "30.0 %",
                "scalars_logged",
            ],
        ),
        (replace(HEALTHY, reads=[WAITS], handlers=[OWN, SHOW]), ["show (train.py:24) waits for the device"]),
        (replace(HEALTHY, reads=[replace(WAITS, calls=50)]), ["once in 20 iterations", "60.0 ms each"]),
        (replace(HEALTHY, reads=[replace(WAITS, calls=3000)]), ["3 times an iteration", "1.00 ms each"]),
        (replace(HEALTHY, reads=[replace(WAITS, seconds=0.1)], handlers=[OWN, SHOW]), ["show takes 32.0 %"]),
        (
            with_tail(SAVE),
            [
                "1 of 100 iterations takes 60.0 ms",
                "median one 10.0 ms",
                "CheckpointHook.after_train_iter takes up to 50.0 ms",
            ],
        ),
        (with_tail(), ["1 of 100 iterations takes 60.0 ms", "no handler takes as long", "TraceHook"]),
        (
            replace(HEALTHY, phases=phases(1000, forward=9e-3), trend=SLOW_START),
            ["the first iteration took 6.01 s", "37.5 %"],
        ),
        (
            replace(HEALTHY, subscribers=[subscriber("JSONLWriter", dropped=500)]),
            ["JSONLWriter does not keep up", "of 1,500 events 500 dropped", "2.00 ms"],
        ),
        (
            replace(HEALTHY, subscribers=[subscriber("JSONLWriter", queued=7)]),
            ["of 1,007 events 7 left", "batch=True"],
        ),
    ],
)
def test_each_trouble_has_one_line_with_figure_cause_and_remedy(costs: RunCosts, words: list[str]) -> None:
    """The line names what takes the time, and says what to do."""
    (line,) = advice(costs)

    for each in words:
        assert each in line


@pytest.mark.parametrize(
    "costs",
    [
        HEALTHY,
        RunCosts(),
        replace(HEALTHY, complete=False, subscribers=[subscriber("JSONLWriter", queued=7)]),
        replace(HEALTHY, subscribers=[subscriber("JSONLWriter", dropped=7, error="OSError: disk full")]),
        replace(HEALTHY, reads=[replace(WAITS, seconds=0.9)]),
        replace(with_tail(SAVE), iteration=Times(100, 11e-3, 10e-3, 60e-3, 80e-3)),
    ],
    ids=[
        "healthy",
        "no iteration",
        "under way",
        "disabled by an error",
        "short waits for the device",
        "too short for a p99",
    ],
)
def test_nothing_is_said_without_need(costs: RunCosts) -> None:
    """Events that wait in a run under way may still be delivered; an error is reported elsewhere."""
    assert advice(costs) == []


def test_three_lines_at_most_the_costliest_first() -> None:
    """Lost events come first, because no time makes up for them."""
    costs = replace(
        slow_loader(0),
        handlers=[OWN, handler("draw", 4.0, 1000, p50=4e-3, longest=5e-3)],
        subscribers=[subscriber("a", dropped=5), subscriber("b")],
        trend=[TrendPoint(first_iter=0, phases=phases(1, forward=6.0)), *slow_loader(0).trend],
    )

    first, second, third = advice(costs)

    assert first.startswith("a does not keep up")
    assert second.startswith("the loader is the bottleneck")
    assert third.startswith("the first iteration took 6.01 s")
