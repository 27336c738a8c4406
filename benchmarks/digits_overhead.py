"""What does the whole default stack cost a training of ~1 ms a step?

The same MLP on scikit-learn's digits, batch 64, one torch thread: a bare loop with nothing around it; the same loop
with SummaryWriter, JSON lines, prints and torch.save by hand; eventloop with its default hooks, TensorBoard, JSONL
and console every 10 iterations and a checkpoint each epoch, and with less and less of that; and the peers, with what
they have for the same (`_digits.py`). A peer that is not installed is named.

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
import io
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from time import perf_counter

import torch

from benchmarks._digits import EVERY, FOREVER, PEERS, Job, Lines, Training
from benchmarks._timing import (
    NOT_INSTALLED,
    command_line,
    environment,
    markdown_table,
    publish,
    version_of,
    yes_no,
)

GOAL = 1.05
BARE, WHOLE = "bare", "eventloop"
KEYS = ("mean", "p50", "p99")
COLUMNS = ["engine", *KEYS, "added to a step", "quartiles", "left per epoch"]
DISTRIBUTIONS = (
    "torch",
    "tensorboard",
    "rich",
    *dict.fromkeys(d for needs, _ in PEERS.values() for d in needs),
)


def bare(job: Job, epochs: int, directory: Path) -> Iterator[None]:
    """Nothing but the training."""
    while True:
        for _ in range(epochs):
            for batch in job.loader:
                job.step(batch)
        yield
        yield


WRITES_BYTES = """
import os, sys
folder, data = sys.argv[1], os.urandom(int(sys.argv[2]))
for number, _ in enumerate(iter(lambda: sys.stdin.buffer.read(1), b"")):
    file = os.open(f"{folder}/new", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.write(file, data)
    os.fsync(file)
    os.close(file)
    os.replace(f"{folder}/new", f"{folder}/{number % 3}")
    file = os.open(folder, os.O_RDONLY)
    os.fsync(file)
    os.close(file)
    sys.stdout.write(".")
    sys.stdout.flush()
"""


def bytes_alone(job: Job, epochs: int, directory: Path) -> Iterator[None]:
    """The bare loop, beside a process that syncs as many bytes each epoch as a checkpoint has, and does nothing
    else: what the machine itself charges for them."""
    state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
    torch.save(state, directory / "size.pth")
    size = 2 * (directory / "size.pth").stat().st_size  # momentum comes with the first step
    other = subprocess.Popen(
        [sys.executable, "-c", WRITES_BYTES, str(directory), str(size)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        while True:
            for _ in range(epochs):
                for batch in job.loader:
                    job.step(batch)
                other.stdin.write(b".")
                other.stdin.flush()
            yield
            other.stdout.read(epochs)
            yield
    finally:
        other.stdin.close()
        other.wait()


def by_hand(job: Job, epochs: int, directory: Path) -> Iterator[None]:
    """What people write: SummaryWriter, a JSON line and a print every 10 iterations, torch.save each epoch."""
    from torch.utils.tensorboard import SummaryWriter

    writer, lines = SummaryWriter(str(directory)), Lines(directory)
    iteration = 0
    try:
        while True:
            for _ in range(epochs):
                for batch in job.loader:
                    loss = job.step(batch)
                    iteration += 1
                    if iteration % EVERY == 0:
                        value, lr = loss.item(), job.lr
                        writer.add_scalar("train/loss", value, iteration)
                        writer.add_scalar("train/lr", lr, iteration)
                        lines.write(iteration, value, lr)
                state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
                torch.save(state, directory / f"iter_{iteration % 3}.pth")
            yield
            writer.flush()
            yield
    finally:
        writer.close()
        lines.close()


def eventloop(
    job: Job, epochs: int, directory: Path, *, writers: bool = True, saves: bool = True
) -> Iterator[None]:
    """The default stack, nine hooks and three writers; or without the writers, or without the checkpoints."""
    from eventloop import Trainer
    from eventloop.hooks import CheckpointHook
    from eventloop.writers import ConsoleWriter, JSONLWriter, TensorBoardWriter

    checkpoint = CheckpointHook(interval=1, max_keep_ckpts=2) if saves else None
    trainer = Trainer(
        job.model,
        optimizer=job.optimizer,
        max_epochs=FOREVER,
        default_hooks={"checkpoint": checkpoint},
        writers=[ConsoleWriter(stream=io.StringIO()), JSONLWriter(), TensorBoardWriter()] if writers else [],
        work_dir=directory,
    )
    running = trainer.epochs()
    try:
        while True:
            for _ in islice(running, epochs):
                for batch in trainer.batches(job.loader):
                    trainer.outputs = {"loss": job.loss(batch)}
            yield
            trainer.bus.flush()
            if checkpoint is not None:
                checkpoint.saves.finish(trainer)
            yield
    finally:
        running.close()  # type: ignore[attr-defined]
        trainer.close()


OURS: dict[str, Training] = {
    BARE: bare,
    "bare, bytes synced beside it": bytes_alone,
    "by hand": by_hand,
    "eventloop, hooks only": partial(eventloop, writers=False, saves=False),
    "eventloop, no checkpoint": partial(eventloop, saves=False),
    WHOLE: eventloop,
}
"""What is always there; "hooks only" is the default hooks without writer and checkpoint."""


def missing(distributions: tuple[str, ...]) -> list[str]:
    """Those that are not installed."""
    return [name for name in distributions if version_of(name) == NOT_INSTALLED]


# --- taking turns ------------------------------------------------------------------------------------------

Turn = dict[str, float]
"""Mean, median and 99th percentile of a turn's steps; `wall`, the whole turn per step, from its beginning until the
background had finished; and what was left to the background, per epoch. All in seconds."""


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


def take_turn(job: Job, training: Iterator[None], epochs: int) -> Turn:
    """One turn of one training.

    Raises:
        RuntimeError: it did not train each batch of so many epochs once.
    """
    job.began.clear()
    began = perf_counter()
    next(training)
    ended = perf_counter()
    next(training)
    finished = perf_counter()
    if len(job.began) != epochs * len(job.loader):
        raise RuntimeError(f"a turn of {epochs} epochs had {len(job.began)} steps, of {len(job.loader)} each")
    steps = [b - a for a, b in pairwise([*job.began, ended])]
    return {
        "mean": statistics.fmean(steps),
        "p50": statistics.median(steps),
        "p99": statistics.quantiles(steps, n=100)[98],
        "wall": (finished - began) / len(steps),
        "left": (finished - ended) / epochs,
    }


# --- the report --------------------------------------------------------------------------------------------


def against_bare(own: list[Turn], bare: list[Turn]) -> dict[str, float]:
    """A case beside the bare loop in the same round, as medians over the rounds: the ratio of each figure, what it
    added to the mean step and the quartiles of that, and what it left per epoch, in seconds."""
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
    """Every case, and every peer that could not be one."""
    lines = [row(name, each) for name, each in compared.items()]
    for name, (needs, _) in PEERS.items():
        if absent := missing(needs):
            what = NOT_INSTALLED if absent[0] == needs[0] else f"without {', '.join(absent)}"
            lines.append([name, what] + [""] * (len(COLUMNS) - 2))
    return lines


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
    publish("\n\n".join(parts), record, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
