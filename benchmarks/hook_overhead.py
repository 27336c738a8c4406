"""What does the bus cost per event, next to a plain `for f in handlers: f(event)` in the same run?

    python -m benchmarks.hook_overhead --json benchmarks/results/hook_overhead.json

Four questions, each answered in interleaved rounds (see `helpers/timing.py`): an event built and dispatched to 0, 1, 5 and
10 handlers; the same announcement by the peers' own code; an event that nobody listens to; one event handed to
seven background subscribers. The handlers do nothing, so what is left is the machinery. Quote the ratios.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import torch

from benchmarks.helpers.dispatch import BUILD, EVENT, dispatch_cases
from benchmarks.helpers.handoff_ways import COROUTINES, THREADS, all_cases
from benchmarks.helpers.in_short import section
from benchmarks.helpers.peer_dispatch import PEERS
from benchmarks.helpers.timing import (
    NOT_INSTALLED,
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
from eventloop.events import AfterTrainIter, AfterValIter

HANDLERS = (0, 1, 5, 10)
EMITS = ("bus.emit, ready", "bus.emit")
VERSIONS = ("torch", "msgspec", "anyio", *dict.fromkeys(package for package, _ in PEERS.values()))

RATIO_GOALS = {10: 1.5, 1: 2.5}
"""Building and emitting an event, over a plain loop that is given the event ready."""
GUARD_GOAL_NS = 80.0
HANDOFF_GOAL_NS = 500.0
GOAL_COLUMNS = ("goal", "wanted", "measured", "met")


# --- (a) and (d): events with sync handlers ----------------------------------------------------------------


def peer_cases(n: int, number: int) -> list[Case]:
    """The peers that are installed."""
    cases = []
    logging.disable()  # they greet and warn while they are set up
    for label, (_, announce) in PEERS.items():
        try:
            source, names = announce(n, EVENT)
        except ImportError:
            continue
        cases.append(statement(f"{label} {n}", source, number, names))
    logging.disable(logging.NOTSET)
    return cases


def dispatch_rows(taken: dict[str, Taken]) -> list[list[str]]:
    """One row for each number of handlers."""
    rows = []
    for n in HANDLERS:
        loop, loop_built = taken[f"plain {n}"], taken[f"plain, built {n}"]
        ready, emit = (taken[f"{case} {n}"] for case in EMITS)
        times = [f"{t.ns:.0f}" for t in (loop, loop_built, ready, emit)]
        ratios = [emit.ratio_to(loop_built), ready.ratio_to(loop), emit.ratio_to(loop)]
        rows.append([str(n), *times, *(f"{r:.2f}" for r in ratios)])
    return rows


def peer_rows(taken: dict[str, Taken]) -> list[list[str]]:
    """One row for each system: its time relative to the plain loop, the event ready; the bus builds its own."""
    rows = [["eventloop bus.emit, event built too", *_ratios(taken, "bus.emit")]]
    for label in PEERS:
        here = f"{label} {HANDLERS[0]}" in taken
        rows.append([label, *(_ratios(taken, label) if here else [NOT_INSTALLED] * len(HANDLERS))])
    return rows


def _ratios(taken: dict[str, Taken], label: str) -> list[str]:
    return [f"{taken[f'{label} {n}'].ratio_to(taken[f'plain {n}']):.1f}" for n in HANDLERS]


# --- (b) and (c): nobody listens, and everybody listens in the background ----------------------------------


def guard_cases(number: int) -> list[Case]:
    """What a loop pays to learn that it need not build an event; the empty loop is part of each figure."""
    bus = Bus()
    bus.subscribe(lambda event: None, AfterTrainIter)
    names: dict[str, Any] = {"bus": bus, "event_type": AfterValIter}
    return [
        statement("empty loop", "pass", number),
        statement("bus.wants", "bus.wants(event_type)", number, names),
        statement("if bus.wants: build, emit", f"if bus.wants(event_type): bus.emit({BUILD})", number, names),
    ]


def guard_rows(taken: dict[str, Taken]) -> list[list[str]]:
    """The cases, in nanoseconds."""
    return [
        [name, f"{taken[name].ns:.0f}"] for name in ("empty loop", "bus.wants", "if bus.wants: build, emit")
    ]


def handoff_rows(taken: dict[str, Taken]) -> list[list[str]]:
    """Every way of handing over, and how many times the cost of one `bus.emit` it is."""
    bus = taken["bus.emit"]
    return [[t.name, f"{t.median * 1e6:.2f}", f"{t.ratio_to(bus):.1f}"] for t in taken.values()]


# --- the report --------------------------------------------------------------------------------------------


def goal_rows(inline: dict[str, Taken], handoff: dict[str, Taken]) -> list[list[str]]:
    """The goals beside what was measured."""
    rows = []
    for n, goal in RATIO_GOALS.items():
        ratio = inline[f"bus.emit {n}"].ratio_to(inline[f"plain {n}"])
        rows.append(
            [f"build+emit / plain, {n} handlers", f"<= {goal}", f"{ratio:.2f}", yes_no(ratio <= goal)]
        )
    for name, taken, limit in (
        ("event nobody listens to: bus.wants", inline["bus.wants"], GUARD_GOAL_NS),
        (f"hand-over to {THREADS + COROUTINES} subscribers", handoff["bus.emit"], HANDOFF_GOAL_NS),
    ):
        rows.append([name, f"<= {limit:.0f} ns", f"{taken.ns:.0f} ns", yes_no(taken.ns <= limit)])
    return rows


def report(about: dict[str, str], inline: dict[str, Taken], handoff: dict[str, Taken]) -> str:
    """The whole page."""
    dispatch = ["handlers", "plain ns", "plain+build ns", "emit ns", "build+emit ns"]
    dispatch += ["build+emit / plain+build", "emit / plain", "build+emit / plain"]
    subscribers = f"{THREADS} threads and {COROUTINES} coroutines"
    parts = [
        f"# {(__doc__ or '').splitlines()[0]}\n\n    {command_line('benchmarks.hook_overhead')}",
        "\n".join(f"- {name}: {value}" for name, value in about.items()),
        "## Goals\n\n" + markdown_table(GOAL_COLUMNS, goal_rows(inline, handoff)),
        "## One event to n handlers that do nothing\n\n" + markdown_table(dispatch, dispatch_rows(inline)),
        "## The same announcement by other systems, as a multiple of the plain loop\n\n"
        + markdown_table(["system", *(f"{n} handlers" for n in HANDLERS)], peer_rows(inline)),
        "## An event nobody listens to\n\n" + markdown_table(["statement", "ns"], guard_rows(inline)),
        f"## One event handed to the background: the bus to {subscribers}, the others to one\n\n"
        + markdown_table(["way", "µs on the emitting thread", "x bus.emit"], handoff_rows(handoff)),
    ]
    return "\n\n".join(parts)


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    ns = {name: each["median_ns"] for name, each in record["figures"]["inline"].items()}
    ten, one, _, handed = (goal["measured"] for goal in record["goals"])
    return section(
        "one event, built and dispatched to handlers that do nothing, beside a plain loop over them.",
        [
            (
                f"To 10 handlers it takes {ns['bus.emit 10']:.0f} ns, {ten} times the plain loop; to 1 handler "
                f"{ns['bus.emit 1']:.0f} ns, {one} times."
            ),
            f"An event that has no subscriber is not built, and costs {ns['bus.wants']:.0f} ns.",
            f"Handing one to {THREADS + COROUTINES} subscribers in the background takes the training thread {handed}.",
        ],
        record["goals"],
        record["environment"],
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31, help="rounds the medians are over")
    parser.add_argument("--number", type=int, default=1000, help="repetitions in a block")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    return parser.parse_args()


def main() -> None:
    """Measure, print, keep."""
    options = arguments()
    torch.set_num_threads(1)
    number, rounds = options.number, options.rounds
    inline_cases = guard_cases(10 * number)
    inline_cases += [case for n in HANDLERS for case in (*dispatch_cases(n, number), *peer_cases(n, number))]
    with all_cases(EVENT, BUILD) as handoff_cases, pinned() as cpu:
        inline = measure(inline_cases, rounds=rounds)
        handoff = measure(handoff_cases, rounds=rounds)
    about = environment(*VERSIONS)
    about["pinned"] = "no" if cpu is None else "the emitting thread, to one CPU"
    about["rounds"] = f"{rounds}, medians; {number} repetitions in a block"
    groups = {"inline": inline, "handoff": handoff}
    figures = {group: {t.name: t.record() for t in taken.values()} for group, taken in groups.items()}
    goals = [dict(zip(GOAL_COLUMNS, r, strict=True)) for r in goal_rows(inline, handoff)]
    record = {"environment": about, "goals": goals, "figures": figures}
    publish(report(about, inline, handoff), record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
