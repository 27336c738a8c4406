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

What a turn left to the background (events on their way to a writer, a checkpoint being written) is finished untimed
before the next one's, so that nobody works in another's time; it is given beside, per epoch. What was imported and
built is frozen out of the garbage collector's sight: a process with six engines has more of it than one with one.

    python -m benchmarks.digits_overhead [--epochs 15] [--sessions 6] [--json PATH] [--markdown PATH]
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
KEYS = ("mean", "p50", "p99")
COLUMNS = ["engine", *KEYS, "added to a step", "quartiles", "left per epoch"]


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


def rows(compared: dict[str, dict[str, float]]) -> list[list[str]]:
    """Return a row for each case, and one for each peer that could not be measured, with the reason."""
    lines = [row(name, each) for name, each in compared.items()]
    for name, (needs, _) in PEERS.items():
        if absent := missing(needs):
            what = NOT_INSTALLED if absent[0] == needs[0] else f"without {', '.join(absent)}"
            lines.append([name, what] + [""] * (len(COLUMNS) - 2))
    return lines


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    by_name = record["compared"]
    mean = {name: f"{each['mean']:.2f}x" for name, each in by_name.items()}
    parts = [(name, mean[name]) for name in by_name if name.startswith(WHOLE)]
    others = [(name, mean[name]) for name in by_name if not name.startswith((WHOLE, BARE))]
    parts_text, others_text = (
        ", ".join(f"{name} {ratio}" for name, ratio in each) for each in (parts, others)
    )
    goal = {
        "goal": "mean step of eventloop, the whole stack", "wanted": f"<= {record['goal']}x",
        "measured": f"{by_name[WHOLE]['mean']:.3f}x", "met": yes_no(record["met"]),
    }  # fmt: skip
    return section(
        f"a bare step of {record['bare_step'] * 1e3:.2f} ms, logged every {EVERY} iterations, with a checkpoint each epoch "
        "of 23 iterations; the mean step beside the bare loop's.",
        [
            f"By part: {parts_text}.",
            f"Beside it: {others_text}.",
            f"Only eventloop's checkpoints are synced to the disk; the bare loop with as many bytes synced: {mean[SYNCED]}.",
        ],
        [goal],
        record["environment"],
    )


def caption(options: argparse.Namespace, step: float, met: bool) -> str:
    """What the table shows."""
    return (
        f"A bare step takes {step * 1e3:.3f} ms. Everything is compared with the bare loop in the same round; "
        f"medians over the {options.rounds} rounds, of {options.epochs} epochs each, of {options.sessions} "
        f"session(s). mean, p50, p99: ratios of a turn's steps. Added: to the mean step, logs and checkpoints "
        f"included, with its quartiles over the rounds. Left per epoch: what a turn leaves to the background is "
        f"finished untimed before the next turn, and is in no other figure; this is how long that takes, divided "
        f"by the turn's epochs (for eventloop: the writers' queues, and the turn's last checkpoint, which is "
        f"synced to the disk; the others' are not). Goal: mean of eventloop at most {GOAL}x: {yes_no(met)}."
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15, help="of a turn")
    parser.add_argument("--sessions", type=int, default=6, help="times everything is built anew")
    parser.add_argument("--rounds", type=int, default=8, help="of a session")
    parser.add_argument("--warm-up", type=int, default=8, help="rounds of a session to leave out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure, print, keep."""
    options = arguments()
    torch.set_num_threads(1)
    cases = OURS | {name: case for name, (needs, case) in PEERS.items() if not missing(needs)}
    turns: dict[str, list[Turn]] = {name: [] for name in cases}
    for _ in range(options.sessions):
        for name, taken in measure(cases, options.epochs, options.rounds, options.warm_up).items():
            turns[name] += taken
    compared = {name: against_bare(own, turns[BARE]) for name, own in turns.items()}
    step = statistics.median(turn["mean"] for turn in turns[BARE])
    versions, met = environment(*DISTRIBUTIONS), compared[WHOLE]["mean"] <= GOAL
    parts = [
        f"# {(__doc__ or '').splitlines()[0]}",
        f"`{command_line('benchmarks.digits_overhead')}`",
        ", ".join(f"{k} {v}" for k, v in versions.items()),
        markdown_table(COLUMNS, rows(compared)),
        caption(options, step, met),
    ]
    record = {
        "environment": versions, "bare_step": step, "compared": compared, "turns": turns, "goal": GOAL, "met": met,
    }  # fmt: skip
    publish("\n\n".join(parts), record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
