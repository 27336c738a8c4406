"""How fast is an event log written, read and replayed?

    python -m benchmarks.replay --json benchmarks/results/replay.json

The log holds `scalars_logged` of three numbers each, what a run logs most. Reading, and driving each writer from it,
are timed with real files; the hand-over is one `bus.emit` of an event that is built already, with the log attached
and, in the same rounds, with a background subscriber that does nothing (see `helpers/timing.py`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time
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
from eventloop.bus import Bus
from eventloop.eventlog.reader import read_events
from eventloop.eventlog.replay import replay
from eventloop.events import AfterTrainIter, Event, ScalarsLogged
from eventloop.events.run import Run
from eventloop.writers.csv_writer import CSVWriter
from eventloop.writers.event_log_writer import EventLogWriter
from eventloop.writers.jsonl import JSONLWriter
from eventloop.writers.tensorboard import TensorBoardWriter
from eventloop.writers.writer import Writer

EVENTS_PER_SECOND = 200_000
HAND_OVER_NS = 1000.0
READ, WRITE, LOG, IDLE = (
    "read_events",
    "EventLogWriter",
    "emit, event log",
    "emit, a subscriber that does nothing",
)
WRITERS: dict[str, Callable[[], Writer]] = {
    "replay to JSONL": JSONLWriter,
    "replay to CSV": CSVWriter,
    "replay to TensorBoard": TensorBoardWriter,
}
EMITS = 400
"""Fewer than the bus takes for a reason to wake its background thread."""


def scalars(count: int) -> list[Event]:
    """What a run logs."""
    return [
        ScalarsLogged(
            step=step,
            iter=step - 1,
            epoch=step // 1000,
            max_epochs=10,
            scalars={"loss": 1 / step, "lr": 1e-3, "time": 0.01},
        )
        for step in range(1, count + 1)
    ]


def write_log(directory: Path, events: list[Event]) -> None:
    """A log of these events."""
    shutil.rmtree(directory, ignore_errors=True)
    writer = EventLogWriter()
    writer.open(Run(work_dir=str(directory)))
    for start in range(0, len(events), 1024):
        writer.write_batch(events[start : start + 1024])
    writer.flush()
    writer.close()


def throughput(directory: Path, count: int) -> list[Case]:
    """Writing, reading and replaying; each case is as many repetitions as there are events."""
    events = scalars(count)
    write_log(directory / "run", events)

    def read() -> None:
        for _ in read_events(directory / "run"):
            pass

    def again(make: Callable[[], Writer]) -> Callable[[], object]:
        return lambda: replay(directory / "run", make(), work_dir=directory / "again")

    def clean() -> None:
        shutil.rmtree(directory / "again", ignore_errors=True)

    return [
        Case(WRITE, lambda: write_log(directory / "written", events), count),
        Case(READ, read, count),
        *(Case(name, again(make), count, clean) for name, make in WRITERS.items()),
    ]


def hand_over(directory: Path) -> tuple[list[Case], list[Bus]]:
    """One emit, with the log and with a subscriber that does nothing."""
    log, idle = Bus(), Bus()
    EventLogWriter().attach(log, lambda: Run(work_dir=str(directory / "emitted")))
    idle.subscribe(lambda event: None, "*", offload="thread")
    event = AfterTrainIter(iter=7, epoch=0, batch_idx=7, max_iters=1000, max_epochs=10)
    cases = [
        statement(name, "emit(event)", EMITS, {"emit": bus.emit, "event": event}, after=bus.flush)
        for name, bus in ((LOG, log), (IDLE, idle))
    ]
    return cases, [log, idle]


def cpu_seconds(case: Case, rounds: int) -> float:
    """Return the median CPU seconds an event, which other users of the machine hardly change."""
    seconds = []
    for _ in range(rounds):
        began = process_time()
        case.block()
        seconds.append((process_time() - began) / case.number)
        if case.after is not None:
            case.after()
    return statistics.median(seconds)


def rows(taken: dict[str, Taken]) -> list[list[str]]:
    """Events a second: the median round, and the fastest."""
    return [
        [name, f"{1e9 / taken[name].ns:,.0f}", f"{1e9 / taken[name].least_ns:,.0f}", f"{taken[name].ns:,.0f}"]
        for name in (WRITE, READ, *WRITERS)
    ]


def goals(taken: dict[str, Taken]) -> list[dict[str, str]]:
    """What was wanted, and what came out; by the median round, and by the fastest, in which nobody else used the
    machine."""
    jsonl, log = taken["replay to JSONL"], taken[LOG]
    found = []
    for which, ns in (("median", jsonl.ns), ("fastest round", jsonl.least_ns)):
        found.append(
            (
                f"events/s, replay to JSONL, {which}",
                f">= {EVENTS_PER_SECOND:,}",
                1e9 / ns,
                ns <= 1e9 / EVENTS_PER_SECOND,
            )
        )
    found.append(
        ("ns, one emit with the event log", f"<= {HAND_OVER_NS:,.0f}", log.ns, log.ns <= HAND_OVER_NS)
    )
    ratio = log.ratio_to(taken[IDLE])
    named = [
        {"goal": goal, "wanted": wanted, "measured": f"{measured:,.0f}", "met": yes_no(met)}
        for goal, wanted, measured, met in found
    ]
    beyond = {"goal": "that / emit with a subscriber that does nothing", "wanted": "<= 1.10"}
    return [*named, beyond | {"measured": f"{ratio:.2f}", "met": yes_no(ratio <= 1.1)}]


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    rates = {name: 1e9 / record["figures"][name]["median_ns"] for name in (WRITE, READ, *WRITERS)}
    again = ", ".join(
        f"{rates[name] / 1e3:,.0f} thousand ({name.removeprefix('replay to ')})" for name in WRITERS
    )
    return section(
        "a log of events of three scalars each: written, read, and replayed to each writer.",
        [
            f"Events a second: {rates[WRITE] / 1e3:,.0f} thousand written, {rates[READ] / 1e3:,.0f} thousand read, replayed {again}.",
            f"One emit with the log attached costs the training thread {record['figures'][LOG]['median_ns']:.0f} ns.",
        ],
        record["goals"],
        record["environment"],
    )


def report(about: dict[str, str], taken: dict[str, Taken]) -> str:
    """The whole page."""
    met = goals(taken)
    return "\n\n".join(
        [
            f"# {(__doc__ or '').splitlines()[0]}\n\n    {command_line('benchmarks.replay')}",
            "\n".join(f"- {name}: {value}" for name, value in about.items()),
            "## Goals\n\n" + markdown_table([*met[0]], [[*goal.values()] for goal in met]),
            "## Events a second\n\n"
            + markdown_table(["", "events/s, median", "events/s, fastest round", "ns an event"], rows(taken)),
        ]
    )


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11, help="rounds the medians are over")
    parser.add_argument("--events", type=int, default=50_000, help="events in the log")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, pinned() as cpu:
        emits, buses = hand_over(Path(directory))
        cases = throughput(Path(directory), options.events)
        taken = measure(cases, rounds=options.rounds)
        of_jsonl = next(case for case in cases if case.name == "replay to JSONL")
        cpu_rate = 1 / cpu_seconds(of_jsonl, options.rounds)
        taken |= measure(emits, rounds=10 * options.rounds)
        for bus in buses:
            bus.close()
    about = environment("msgspec", "tensorboard", "google-crc32c")
    about["load"] = ", ".join(f"{load:.1f}" for load in os.getloadavg()) + " (1, 5, 15 minutes)"
    about["replay to JSONL, by processor time"] = f"{cpu_rate:,.0f} events a second"
    about["pinned"] = "no" if cpu is None else "to one CPU"
    about["rounds"] = f"{options.rounds} of {options.events:,} events; {10 * options.rounds} of {EMITS} emits"
    figures: dict[str, Any] = {name: case.record() for name, case in taken.items()}
    record = {"environment": about, "goals": goals(taken), "figures": figures}
    publish(report(about, taken), record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
