"""How many events a second reach ten background subscribers, and is every account exact meanwhile?

    python -m benchmarks.throughput --json benchmarks/results/throughput.json

One thread emits events in a tight loop to ten plain functions with `offload="thread"` that do nothing, one of them with
`every=7`. The process is pinned to one CPU. A rate is the number of emitted events by the seconds from the first emit
until everything is delivered. In other rounds a second thread looks at `bus.stats()` all the time and compares each
account with the emitting thread's own count: before and after the look, so that a look at any moment has bounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.helpers.in_short import section
from benchmarks.helpers.timing import command_line, environment, markdown_table, publish, yes_no
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, Event

SUBSCRIBERS, EVERY = 10, 7
RATE_GOAL = 300_000.0


def ignore(event: Event) -> None:
    """Do nothing."""


class Emitter:
    """A bus with ten subscribers, and the count of the events that it was given."""

    def __init__(self) -> None:
        self.bus = Bus()
        self.begun = self.ended = 0
        for number in range(SUBSCRIBERS):
            every = EVERY if number == SUBSCRIBERS - 1 else 1
            self.bus.subscribe(
                ignore, AfterTrainIter, offload="thread", every=every, name=f"subscriber {number}"
            )

    def emit(self, count: int) -> None:
        """Emit events in a tight loop."""
        for _ in range(count):
            self.begun += 1
            self.bus.emit(AfterTrainIter(iter=self.begun - 1))
            self.ended += 1

    def rate(self, count: int) -> float:
        """Return the events a second that were emitted and delivered."""
        began = perf_counter()
        self.emit(count)
        assert self.bus.close(120.0).ok
        return count / (perf_counter() - began)

    def look(self, over: threading.Event) -> tuple[int, int, float]:
        """Look at the accounts until `over`; return the looks, the wrong accounts and the longest look."""
        looks, wrong, longest = 0, 0, 0.0
        while not over.is_set():
            least, began = self.ended, perf_counter()
            totals = [s.delivered + s.failed + s.dropped + s.queued for s in self.bus.stats()]
            longest, most = max(longest, perf_counter() - began), self.begun
            looks += 1
            for number, total in enumerate(totals):
                every = EVERY if number == SUBSCRIBERS - 1 else 1
                wrong += not least // every <= total <= most // every
        return looks, wrong, longest


def accounts(count: int) -> tuple[int, int, float]:
    """Return what `Emitter.look` finds while another thread emits."""
    emitter, over = Emitter(), threading.Event()
    found: list[tuple[int, int, float]] = []
    watching = threading.Thread(target=lambda: found.append(emitter.look(over)))
    watching.start()
    emitter.emit(count)
    over.set()
    watching.join()
    assert emitter.bus.close(120.0).ok
    return found[0]


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page."""
    figures = record["figures"]
    return section(
        "a tight loop of emits to ten subscribers on threads, on one CPU.",
        [
            f"{figures['rate']:,.0f} events a second are emitted and delivered to all ten.",
            (
                f"{figures['looks']:,} looks at the accounts meanwhile: {figures['wrong']} wrong; the longest took "
                f"{figures['longest'] * 1e3:.0f} ms beside eleven busy threads."
            ),
        ],
        record["goals"],
        record["environment"],
    )


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--events", type=int, default=100_000, help="of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rates, looks, wrong, longest = [], 0, 0, 0.0
    for _ in range(options.rounds):
        rates.append(Emitter().rate(options.events))
        more, bad, slowest = accounts(options.events)
        looks, wrong, longest = looks + more, wrong + bad, max(longest, slowest)
    rate = statistics.median(rates)
    goals = [
        goal("events a second to ten subscribers", f">= {RATE_GOAL:,.0f}", f"{rate:,.0f}", rate >= RATE_GOAL),
        goal("wrong accounts", "0", str(wrong), not wrong),
    ]
    about = environment("msgspec", "anyio")
    parts = [
        f"# {(__doc__ or '').splitlines()[0]}",
        f"`{command_line('benchmarks.throughput')}`",
        ", ".join(f"{name} {value}" for name, value in about.items()),
        markdown_table([*goals[0]], [[*each.values()] for each in goals]),
        f"Median of {options.rounds} rounds of {options.events:,} events; from {min(rates):,.0f} to {max(rates):,.0f}.",
    ]
    figures = {"rate": rate, "rates": rates, "looks": looks, "wrong": wrong, "longest": longest}
    record = {"environment": about, "goals": goals, "figures": figures}
    publish("\n\n".join(parts), record, short, json=options.json, markdown=options.markdown)


def goal(name: str, wanted: str, measured: str, met: bool) -> dict[str, str]:
    """Return a row of the goals."""
    return {"goal": name, "wanted": wanted, "measured": measured, "met": yes_no(met)}


if __name__ == "__main__":
    main()
