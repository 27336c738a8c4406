"""Does the resident size stay flat over a long run, when a background writer cannot keep up?

    python -m benchmarks.memory --json benchmarks/results/memory.json

The loop emits `before_train_iter` and `after_train_iter` as fast as it can, polling the bus once an iteration as
the trainer does. A writer on a thread of its own sleeps on every delivery, so that its bounded queue is full all
the time and drops what is oldest. A queue, an inbox or an account that keeps what it has seen would grow with the
number of events. What was emitted must be delivered, dropped or still queued, to the last event.

The allocator keeps what the fullest moment took. So that this moment does not come half-way and look like a leak,
the loop is held once, before the first look, for more events than it can lag behind later: the account is looked at now
and then, which waits for it.
"""

from __future__ import annotations

import argparse
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep

from benchmarks._timing import command_line, environment, markdown_table, publish, yes_no
from eventloop.bus import Bus
from eventloop.bus.subscription import Subscription
from eventloop.events import AfterTrainIter, BeforeTrainIter, Event

CHECKPOINTS = 10
LAG = 65_536
"""Events that the loop is held for, more than it lags behind when it is not."""
LOOK = 10_000
"""Iterations between two looks at the account, before which all that was emitted is routed."""
GROWTH_GOAL_MIB = 2.0
"""One machine word kept for each event would be 14 MiB after the first tenth of two million. What the allocator
keeps around such an inbox (5 MiB) differs by up to 1.5 MiB from run to run."""


class LoopHeld(Event):
    """Asks a coroutine to hold the background loop."""


@dataclass(frozen=True)
class Checkpoint:
    """The resident size after so many events, and what the slow writer's account says."""

    events: int
    rss_mib: float
    seconds: float
    delivered: int
    dropped: int
    queued: int


def resident_mib() -> float:
    """The resident size of this process, from Linux's /proc."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def emit_iterations(bus: Bus, first: int, last: int, total: int) -> None:
    """What a training loop announces in iterations `first` to `last`."""
    for i in range(first, last):
        bus.emit(BeforeTrainIter(iter=i, epoch=0, batch_idx=i, max_iters=total, max_epochs=1))
        bus.emit(AfterTrainIter(iter=i, epoch=0, batch_idx=i, max_iters=total, max_epochs=1))
        bus.poll()
        if i % LOOK == LOOK - 1:
            bus.stats()


def fill_the_inbox(bus: Bus, iterations: int) -> None:
    """Emit while the background loop is held by a coroutine that should not have waited."""
    holding, release = threading.Event(), threading.Event()

    async def hold(event: LoopHeld) -> None:
        holding.set()
        release.wait()

    with bus.subscribe(hold, LoopHeld):
        bus.emit(LoopHeld())
        holding.wait()
        emit_iterations(bus, 0, iterations, iterations)
        release.set()
        bus.flush(0.0)


def run(events: int, writer_seconds: float, queue: int) -> tuple[list[Checkpoint], bool]:
    """Emit `events` events; return the size on the way, and whether the writer's account adds up at the end."""
    seen: list[Checkpoint] = []
    with Bus(drain_timeout=1.0) as bus:
        writer = bus.subscribe(
            lambda event: sleep(writer_seconds), BeforeTrainIter, AfterTrainIter, name="slow writer",
            offload="thread", queue=queue, overflow="drop_oldest",
        )  # fmt: skip
        bus.subscribe(lambda event: None, AfterTrainIter)
        fill_the_inbox(bus, LAG // 2)
        emitted, began, share = 2 * (LAG // 2), perf_counter(), events // 2 // CHECKPOINTS
        for tenth in range(CHECKPOINTS):
            emit_iterations(bus, tenth * share, (tenth + 1) * share, events // 2)
            emitted += 2 * share
            seen.append(look(writer, emitted, perf_counter() - began))
        account = writer.stats
    return seen, emitted == account.delivered + account.failed + account.dropped + account.queued


def look(writer: Subscription, emitted: int, seconds: float) -> Checkpoint:
    """The state of things now."""
    account = writer.stats
    return Checkpoint(emitted, resident_mib(), seconds, account.delivered, account.dropped, account.queued)


def goal_rows(seen: list[Checkpoint], adds_up: bool) -> list[list[str]]:
    """The goals beside what was measured."""
    growth = seen[-1].rss_mib - seen[0].rss_mib
    per_event = growth * 2**20 / (seen[-1].events - seen[0].events)
    grown = f"{growth:+.2f} MiB, {per_event:+.2f} bytes an event"
    return [
        [
            "growth after the first tenth",
            f"<= {GROWTH_GOAL_MIB} MiB",
            grown,
            yes_no(growth <= GROWTH_GOAL_MIB),
        ],
        ["delivered + dropped + queued == emitted", "exactly", yes_no(adds_up), yes_no(adds_up)],
    ]


def report(about: dict[str, str], seen: list[Checkpoint], adds_up: bool) -> str:
    """The whole page."""
    columns = ["events", "RSS MiB", "seconds", "delivered", "dropped", "queued"]
    rows = [
        [
            f"{c.events:,}",
            f"{c.rss_mib:.2f}",
            f"{c.seconds:.1f}",
            f"{c.delivered:,}",
            f"{c.dropped:,}",
            c.queued,
        ]
        for c in seen
    ]
    parts = [
        f"# Does memory stay flat when a writer cannot keep up?\n\n    {command_line('benchmarks.memory')}",
        "\n".join(f"- {name}: {value}" for name, value in about.items()),
        "## Goals\n\n" + markdown_table(["goal", "wanted", "measured", "met"], goal_rows(seen, adds_up)),
        "## On the way\n\n" + markdown_table(columns, rows),
    ]
    return "\n\n".join(parts)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--events", type=int, default=2_000_000, help="two an iteration")
    parser.add_argument("--writer-seconds", type=float, default=0.001, help="what one delivery takes")
    parser.add_argument("--queue", type=int, default=1024, help="events that may wait for the writer")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    return parser.parse_args()


def main() -> None:
    """Emit, look, print, keep."""
    options = arguments()
    about = environment("msgspec", "blinker", "anyio")
    about["writer"] = (
        f"sleeps {options.writer_seconds * 1e3:g} ms a delivery, queue of {options.queue}, drop_oldest"
    )
    seen, adds_up = run(options.events, options.writer_seconds, options.queue)
    record = {"environment": about, "adds_up": adds_up, "checkpoints": [asdict(c) for c in seen]}
    publish(report(about, seen, adds_up), record, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
