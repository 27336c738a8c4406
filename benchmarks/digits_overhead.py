"""What does each part of the default stack cost a training of ~1 ms a step with frequent checkpoints?

The same MLP on scikit-learn's digits, batch 64, one torch thread: a bare loop with nothing around it; the same loop
with SummaryWriter, JSON lines, prints and torch.save by hand; eventloop with its default hooks, TensorBoard, JSONL
and console every 10 iterations and a checkpoint each epoch, and with less and less of that; and the peers, with what
they have for the same (`helpers/digits_training.py`). A peer that is not installed is named.

The machine's speed changes within seconds, so all trainings go on at the same time in turns of a few epochs, and a
turn is compared with the bare loop's turn of the same round. Where a model lies in memory makes it faster or slower
by some percent, so everything is built anew several times. The first rounds, in which engines warm up and
eventloop's checkpoint process starts, are left out.

A step lasts from the beginning of one forward pass to that of the next, the last one of a turn to the turn's end; so
the end of an epoch counts, and setting up an engine does not. Engines that own their loop (MMEngine, Lightning,
transformers) train in one single call, in a greenlet on the same thread that is paused where an epoch begins;
ignite's `run` is called once a turn and goes on where it ended.

What a turn left to the background (events on their way to a writer, a checkpoint being written) is finished before the
next one's, so that nobody works in another's time. A whole run has it; the steps have not. What was imported and built is frozen out of the garbage collector's sight: a process with six engines has more of it than one with one.

    python -m benchmarks.digits_overhead [--epochs 15] [--sessions 6] [--json PATH] [--markdown PATH]
    python -m benchmarks.digits_overhead --from digits_overhead.json --markdown digits_overhead.md    # write it again
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.helpers.digits_training import EVERY, PEERS, Job, Training
from benchmarks.helpers.in_short import section
from benchmarks.helpers.own_trainings import (
    BARE,
    DISTRIBUTIONS,
    OURS,
    SYNCED,
    WHOLE,
    Turn,
    missing,
    take_turn,
)
from benchmarks.helpers.timing import (
    NOT_INSTALLED,
    command_line,
    environment,
    markdown_table,
    publish,
    yes_no,
)

GOAL = 1.05
KEYS = ("wall", "mean", "p50", "p99")
COLUMNS = [
    "engine",
    "whole run",
    "mean step",
    "p50",
    "p99",
    "added to a step",
    "quartiles",
    "left per epoch",
]


# --- taking turns ------------------------------------------------------------------------------------------


@contextmanager
def training(cases: dict[str, Training], epochs: int) -> Iterator[dict[str, tuple[Job, Iterator[None]]]]:
    """Every case with a job and a directory of its own, and ended at the end."""
    with tempfile.TemporaryDirectory() as directory:
        started = {}
        for name, case in cases.items():
            own = Path(directory) / name.replace(" ", "_")
            own.mkdir()
            job = Job()
            started[name] = job, case(job, epochs, own)
        yield started
        for _, turns in started.values():
            turns.close()  # type: ignore[attr-defined]


def measure(cases: dict[str, Training], epochs: int, rounds: int, warm_up: int) -> dict[str, list[Turn]]:
    """Every turn, by case; each round begins with another case."""
    taken: dict[str, list[Turn]] = {name: [] for name in cases}
    names = [*cases]
    with training(cases, epochs) as started:
        for turn in range(-warm_up, rounds):
            if turn == 0:
                gc.collect()
                gc.freeze()
            begin = turn % len(names)
            for name in names[begin:] + names[:begin]:
                figures = take_turn(*started[name], epochs)
                if turn >= 0:
                    taken[name].append(figures)
    gc.unfreeze()
    return taken


# --- the report --------------------------------------------------------------------------------------------


def against_bare(own: list[Turn], bare: list[Turn]) -> dict[str, float]:
    """Compare the turns of a case with those of the bare loop in the same rounds, as medians.

    Returns the ratio of each figure, the seconds that the case adds to the mean step with their
    quartiles, and the seconds of work that it left to the background per epoch.
    """
    ratios = {key: statistics.median(a[key] / b[key] for a, b in zip(own, bare, strict=True)) for key in KEYS}
    added = [a["mean"] - b["mean"] for a, b in zip(own, bare, strict=True)]
    low, middle, high = statistics.quantiles(added, n=4) if len(added) > 1 else added * 3
    left = statistics.median(turn["left"] for turn in own)
    return {**ratios, "added": middle, "added_quartile_1": low, "added_quartile_3": high, "left": left}


def row(name: str, compared: dict[str, float]) -> list[str]:
    """A line of the table."""
    ratios = [f"{compared[key]:.3f}x" for key in KEYS]
    low, high = (f"{compared[f'added_quartile_{n}'] * 1e6:+.0f}" for n in (1, 3))
    added, left = f"{compared['added'] * 1e6:+.0f} µs", f"{compared['left'] * 1e3:.1f} ms"
    if name == BARE:
        added = low = high = ""
    return [name, *ratios, added, f"{low} to {high}" if low else "", left]


def rows(record: dict[str, Any]) -> list[list[str]]:
    """Return a row for each case, and one for each peer that could not be measured, with the reason."""
    lines = [row(name, each) for name, each in record["compared"].items()]
    return lines + [[name, why] + [""] * (len(COLUMNS) - 2) for name, why in record["absent"].items()]


def absent() -> dict[str, str]:
    """Return the peers that could not be measured, and why."""
    found = {}
    for name, (needs, _) in PEERS.items():
        if lacks := missing(needs):
            found[name] = NOT_INSTALLED if lacks[0] == needs[0] else f"without {', '.join(lacks)}"
    return found


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    by_name = record["compared"]
    whole = {name: f"{each['wall']:.2f}x" for name, each in by_name.items()}
    parts = [(name, whole[name]) for name in by_name if name.startswith(WHOLE)]
    others = [(name, whole[name]) for name in by_name if not name.startswith((WHOLE, BARE))]
    parts_text, others_text = (
        ", ".join(f"{name} {ratio}" for name, ratio in each) for each in (parts, others)
    )
    goal = {
        "goal": "whole run of eventloop, the whole stack",
        "wanted": f"<= {record['goal']}x",
        "measured": f"{by_name[WHOLE]['wall']:.3f}x",
        "met": yes_no(by_name[WHOLE]["wall"] <= record["goal"]),
    }
    return section(
        f"a bare step of {record['bare_step'] * 1e3:.2f} ms, logged every {EVERY} iterations, with a checkpoint each epoch "
        "of 23 iterations; the whole run to the bare loop's.",
        [
            f"By part: {parts_text}.",
            f"Beside it: {others_text}.",
            f"Only eventloop's checkpoints are synced to the disk; the bare loop with as many bytes synced: {whole[SYNCED]}.",
        ],
        [goal],
        record["environment"],
    )


def caption(record: dict[str, Any]) -> str:
    """What the table shows."""
    options, met = record["options"], record["compared"][WHOLE]["wall"] <= record["goal"]
    return (
        f"A bare step takes {record['bare_step'] * 1e3:.3f} ms. Everything is compared with the bare loop in the same "
        f"round; medians over the {options['rounds']} rounds, of {options['epochs']} epochs each, of "
        f"{options['sessions']} session(s). Whole run: a turn, and what it left to the background, until that is done. "
        f"mean step, p50, p99: ratios of a turn's steps. Added: to the mean step, logs and checkpoints included, with "
        f"its quartiles over the rounds. Left per epoch: how long it takes to finish what a turn left to the background "
        f"(for eventloop: the writers' queues, and the turn's last checkpoint, which is synced to the disk; the others' "
        f"are not), divided by the turn's epochs. Goal: the whole run of eventloop at most {record['goal']}x: "
        f"{yes_no(met)}."
    )


def page_of(record: dict[str, Any]) -> str:
    """The whole page."""
    parts = [
        f"# {(__doc__ or '').splitlines()[0]}",
        f"`{record['command']}`",
        ", ".join(f"{name} {value}" for name, value in record["environment"].items()),
        markdown_table(COLUMNS, rows(record)),
        caption(record),
    ]
    return "\n\n".join(parts)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15, help="of a turn")
    parser.add_argument("--sessions", type=int, default=6, help="times everything is built anew")
    parser.add_argument("--rounds", type=int, default=8, help="of a session")
    parser.add_argument("--warm-up", type=int, default=8, help="rounds of a session to leave out")
    parser.add_argument("--from", dest="kept", type=Path, help="report on a JSON file, and measure nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as it is kept."""
    torch.set_num_threads(1)
    cases = OURS | {name: case for name, (needs, case) in PEERS.items() if not missing(needs)}
    turns: dict[str, list[Turn]] = {name: [] for name in cases}
    for _ in range(options.sessions):
        for name, taken in measure(cases, options.epochs, options.rounds, options.warm_up).items():
            turns[name] += taken
    return {
        "command": command_line("benchmarks.digits_overhead"),
        "environment": environment(*DISTRIBUTIONS),
        "options": {key: getattr(options, key) for key in ("sessions", "rounds", "epochs")},
        "bare_step": statistics.median(turn["mean"] for turn in turns[BARE]),
        "compared": {name: against_bare(own, turns[BARE]) for name, own in turns.items()},
        "absent": absent(),
        "turns": turns,
        "goal": GOAL,
    }


def main() -> None:
    """Measure, or read what was; print, keep."""
    options = arguments()
    record = measured(options) if options.kept is None else msgspec.json.decode(options.kept.read_bytes())
    publish(page_of(record), record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
