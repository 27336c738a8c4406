"""What does a subscriber that has fallen behind cost the training thread?

    python -m benchmarks.spill --json benchmarks/results/spill.json

A subscriber on a thread of its own hangs, and its queue of 1024 is full: every further event is encoded and goes to a
temporary file (overflow="spill"), or pushes out the oldest (overflow="drop_oldest"). The emitting thread should not
notice which. A burst is what a training emits between two looks of the background loop; a sustained emit, without a
pause, competes with that loop for the interpreter, so that whatever the loop does shows.

The throughput is taken from the first emit until the last event has been routed, and from the release of the
subscriber until it has been given the last one, in batches; beside it the same with a queue that holds them all.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.helpers.in_short import section
from benchmarks.helpers.timing import (
    Case,
    Taken,
    command_line,
    environment,
    markdown_table,
    measure,
    pinned,
    publish,
    statement,
    yes_no,
)
from eventloop.background.queues.options import Overflow
from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import AfterTrainIter

BURST, SUSTAINED = 400, 20_000
BLOCK = 20_000
"""Events between two waits for the loop where throughput is taken: the inbox never overflows."""
EMIT_GOAL = 1.05
"""A burst's emit with a spilling subscriber, as a multiple of the same with one that drops."""
EVENT = AfterTrainIter(iter=1000, epoch=1, batch_idx=10, max_iters=10_000, max_epochs=10)
WAIT = 600.0
GOAL_COLUMNS = ("goal", "wanted", "measured", "met")


@contextmanager
def behind(overflow: Overflow, queue: int) -> Iterator[tuple[Bus, Subscription, Callable[[], None]]]:
    """Yield a bus whose one subscriber hangs, its subscription, and the function that releases it."""
    gate = threading.Event()

    def hang(events: list[AfterTrainIter]) -> None:
        gate.wait(WAIT)

    with Bus(drain_timeout=WAIT) as bus:
        subscription = bus.subscribe(
            hang,
            AfterTrainIter,
            offload="thread",
            overflow=overflow,
            queue=queue,
            batch=True,
            stall_timeout=WAIT,
        )
        for _ in range(4):
            for _ in range(queue if queue < BLOCK else 1):
                bus.emit(EVENT)
            subscription.stats  # noqa: B018  # looking at the account waits until all was routed
        yield bus, subscription, gate.set
        gate.set()


def emit_cases(bus: Bus, subscription: Subscription, overflow: str) -> list[Case]:
    """An emit in a burst and without a pause, each followed, untimed, by the routing."""
    names: dict[str, Any] = {"bus": bus, "event": EVENT}

    def routed() -> None:
        subscription.stats  # noqa: B018

    return [
        statement(f"{overflow}, burst", "bus.emit(event)", BURST, names, routed),
        statement(f"{overflow}, sustained", "bus.emit(event)", SUSTAINED, names, routed),
    ]


def time_emits(rounds: int) -> dict[str, Taken]:
    """The two policies side by side."""
    with behind("spill", 1024) as (spilling, one, _), behind("drop_oldest", 1024) as (dropping, other, _):
        cases = emit_cases(spilling, one, "spill") + emit_cases(dropping, other, "drop_oldest")
        with pinned():
            taken = measure(cases, rounds=rounds)
        lost = one.stats.dropped
    if lost:
        raise SystemExit(f"{lost} events were dropped: the figures would not be of spilling")
    return taken


def throughput(queue: int, events: int) -> tuple[float, float]:
    """Return the seconds to take in `events` events for a subscriber that is behind, and to deliver them."""
    with behind("spill", queue) as (bus, subscription, release):
        had, began = subscription.stats.queued, perf_counter()
        for _ in range(events // BLOCK):
            for _ in range(BLOCK):
                bus.emit(EVENT)
            subscription.stats  # noqa: B018
        put = perf_counter() - began
        if subscription.stats.queued != had + events:
            raise SystemExit("events were lost")
        began = perf_counter()
        release()
        bus.flush(WAIT)
        return put, perf_counter() - began


def median_throughput(queue: int, events: int, rounds: int) -> tuple[float, float]:
    """Events a second in, and out; medians over rounds."""
    taken = [throughput(queue, events) for _ in range(rounds)]
    put, got = (sorted(column)[rounds // 2] for column in zip(*taken, strict=True))
    return events / put, events / got


def goal_rows(taken: dict[str, Taken]) -> list[list[str]]:
    """The goal beside what was measured."""
    ratio = taken["spill, burst"].ratio_to(taken["drop_oldest, burst"])
    return [
        [
            "emit of a training, spill / drop_oldest",
            f"<= {EMIT_GOAL}",
            f"{ratio:.3f}",
            yes_no(ratio <= EMIT_GOAL),
        ]
    ]


def report(about: dict[str, str], taken: dict[str, Taken], rates: dict[str, tuple[float, float]]) -> str:
    """The whole page."""
    emits = []
    for kind in ("burst", "sustained"):
        spill, drop = taken[f"spill, {kind}"], taken[f"drop_oldest, {kind}"]
        emits.append([kind, f"{spill.ns:.0f} ns", f"{drop.ns:.0f} ns", f"{spill.ratio_to(drop):.3f}"])
    rows = [[name, f"{put:,.0f}", f"{got:,.0f}"] for name, (put, got) in rates.items()]
    return "\n\n".join(
        [
            f"# {(__doc__ or '').splitlines()[0]}\n\n    {command_line('benchmarks.spill')}",
            "\n".join(f"- {name}: {value}" for name, value in about.items()),
            "## Goals\n\n" + markdown_table(GOAL_COLUMNS, goal_rows(taken)),
            "## One emit, on the training thread\n\n"
            + markdown_table(["emitting", "spill", "drop_oldest", "ratio"], emits),
            "## Events a second, in the background\n\n"
            + markdown_table(["waiting in", "taken in", "given out"], rows),
        ]
    )


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    emits, rates = record["emits"], record["events_per_second"]
    spill, drop = (emits[f"{overflow}, burst"]["median_ns"] for overflow in ("spill", "drop_oldest"))
    (file_in, file_out), (memory_in, _) = rates.values()
    return section(
        "emits to a subscriber that hangs and whose queue is full; events go to a file, or the oldest are dropped.",
        [
            f"The training thread pays {spill:.0f} ns an emit when events go to a file, and {drop:.0f} ns when they drop.",
            (
                f"The background takes {file_in:,.0f} events a second into the file ({memory_in:,.0f} into memory) and gives "
                f"{file_out:,.0f} a second out of it."
            ),
        ],
        record["goals"],
        record["environment"],
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31, help="of the emits")
    parser.add_argument("--events", type=int, default=400_000, help="that spill where throughput is taken")
    parser.add_argument("--repeats", type=int, default=5, help="of the throughput")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    return parser.parse_args()


def main() -> None:
    """Time, print, keep."""
    options = arguments()
    about = environment("msgspec", "blinker", "anyio")
    taken = time_emits(options.rounds)
    rates = {
        "a file (queue of 1024)": median_throughput(1024, options.events, options.repeats),
        "memory (queue of a million)": median_throughput(1_000_000, options.events, options.repeats),
    }
    record = {
        "environment": about,
        "goals": [dict(zip(GOAL_COLUMNS, row, strict=True)) for row in goal_rows(taken)],
        "emits": {name: t.record() for name, t in taken.items()},
        "events_per_second": rates,
    }
    publish(report(about, taken, rates), record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
