"""What do slow, heavy and busy writers cost the steps of a training?

    python -m benchmarks.slow_writers --json benchmarks/results/slow_writers.json

Four questions, each answered beside what people write by hand with torch's `SummaryWriter`, inline or on a bare thread, in
the same run:

- a writer that sleeps 50 ms over each write, one write every 10 steps (a slow disk, a remote file system);
- a writer that burns 20 ms of Python over each write, one write every 40 steps (an image, a checksum, a slow client);
- an image of 512x512 or a histogram of 100,000 values: what it adds to the call and the 20 steps after it;
- JSON lines, TensorBoard, the event log (not by hand) and a console, 10 scalars in every step.

A turn is so many steps of one training, which goes on where it ended. Cases take turns in interleaved rounds; what a
turn left to the background is finished untimed before the next one begins. A case is compared with the same loop
without writers in the same round, and what is quoted is the median over the rounds of that ratio.
"""

from __future__ import annotations

import argparse
import gc
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.helpers.burning_writer import BURN_SECONDS, BurningWriter, turns
from benchmarks.helpers.in_short import section
from benchmarks.helpers.timing import command_line, environment, markdown_table, publish, yes_no
from benchmarks.helpers.writers_by_hand import (
    EVERY,
    SCALARS,
    SLOW_SECONDS,
    Job,
    Put,
    Training,
    by_hand,
    nothing,
)
from eventloop import Bus, Trainer
from eventloop.events import Event
from eventloop.hooks import LoggerHook
from eventloop.writers import ConsoleWriter, EventLogWriter, JSONLWriter, TensorBoardWriter
from eventloop.writers.writer import Writer

FOREVER = 1_000_000
BURN_EVERY = 40
"""Steps from one write that burns to the next."""
AFTER = 20
"""Steps after a medium whose time is charged to it."""
APART = 10 * AFTER
"""Steps from one medium to the next; the last of them are the comparison, when a bare thread is done with it, too."""


class SlowWriter(Writer):
    """Writes to a disk that takes its time."""

    def __init__(self) -> None:
        self.written = 0

    def write(self, event: Event) -> None:
        """Sleep."""
        time.sleep(SLOW_SECONDS)
        self.written += 1


def ours(
    steps: int,
    directory: Path,
    *,
    writers: Callable[[], list[Writer]] = list,
    interval: int = EVERY,
    scalars: int = 1,
    put: Put = nothing,
    accounts: list[str] | None = None,
) -> Iterator[list[float]]:
    """eventloop's default stack without checkpoints, and these writers."""
    job, made = Job(steps), writers()
    trainer = Trainer(
        job.model,
        optimizer=job.optimizer,
        max_epochs=FOREVER,
        default_hooks={"checkpoint": None},
        hooks=[LoggerHook(interval=interval)],
        writers=made,
        work_dir=directory,
        bus=Bus(drain_timeout=600.0),
    )
    running = trainer.epochs()
    try:
        while True:
            next(running)
            began: list[float] = []
            for number, batch in enumerate(trainer.batches(job.batches)):
                began.append(perf_counter())
                put(trainer.metrics, number)
                loss = job.loss(batch)
                more = {f"scalar_{i}": loss.detach() * i for i in range(1, scalars)}
                trainer.outputs = {"loss": loss, **more}
            yield [*began, perf_counter()]
            trainer.bus.flush()
            if accounts is not None:
                accounts.append(account(trainer, made))
            yield []
    finally:
        running.close()  # type: ignore[attr-defined]
        trainer.close()


def account(trainer: Trainer, writers: list[Writer]) -> str:
    """Return how many events were due for the slow writer, and what became of them.

    Raises:
        RuntimeError: the account of the bus and the writer's own count differ.
    """
    stats = next(row for row in trainer.bus.stats() if row.name == "SlowWriter")
    due = trainer.iter // EVERY
    assert isinstance(writers[0], SlowWriter)
    written = writers[0].written
    if stats.delivered + stats.dropped + stats.failed + stats.queued != due or written != stats.delivered:
        raise RuntimeError(f"{due} events were due, {written} were written, and the account says {stats}")
    return f"{due} due, {stats.delivered} written, {stats.dropped} dropped, {stats.queued} queued"


IMAGE = np.random.default_rng(0).integers(0, 256, (3, 512, 512), dtype=np.uint8)
VALUES = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)


def put_ours(kind: str, metrics: Any, number: int) -> None:
    """Put a medium where one is due."""
    if number % APART == 0:
        metrics.put_image("image", IMAGE) if kind == "image" else metrics.put_histogram("values", VALUES)


def put_by_hand(kind: str, writer: Any, number: int) -> None:
    """The same with SummaryWriter."""
    if number % APART == 0:
        writer.add_image("image", IMAGE) if kind == "image" else writer.add_histogram("values", VALUES)


# --- taking turns ------------------------------------------------------------------------------------------


@contextmanager
def training(cases: dict[str, Training], steps: int) -> Iterator[dict[str, Iterator[list[float]]]]:
    """Every case with a directory of its own, and ended at the end."""
    with tempfile.TemporaryDirectory() as directory:
        started = {}
        for number, (name, case) in enumerate(cases.items()):
            own = Path(directory) / str(number)
            own.mkdir()
            started[name] = case(steps, own)
        yield started
        for turns in started.values():
            turns.close()  # type: ignore[attr-defined]


def measure(
    cases: dict[str, Training], steps: int, rounds: int, warm_up: int
) -> dict[str, list[list[float]]]:
    """The times of every step of every turn, by case; each round begins with another case."""
    taken: dict[str, list[list[float]]] = {name: [] for name in cases}
    names = [*cases]
    with training(cases, steps) as started:
        for turn in range(-warm_up, rounds):
            if turn == 0:
                gc.collect()
                gc.freeze()
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                began = next(started[name])
                next(started[name])
                if turn >= 0:
                    taken[name].append([after - before for before, after in pairwise(began)])
    gc.unfreeze()
    return taken


def ratios(own: list[list[float]], bare: list[list[float]]) -> tuple[float, float, float]:
    """Return the ratios of p50, p99 and mean of a turn's steps to the bare loop's, as medians over rounds."""
    figures: list[Callable[[list[float]], float]] = [
        statistics.median,
        lambda steps: statistics.quantiles(steps, n=100, method="inclusive")[98],
        statistics.fmean,
    ]
    p50, p99, mean = (
        statistics.median(figure(a) / figure(b) for a, b in zip(own, bare, strict=True)) for figure in figures
    )
    return p50, p99, mean


def added(turns: list[list[float]]) -> float:
    """Return the seconds that an image or histogram adds to its step and the 20 after it, as a median.

    They are compared with as many steps without one.
    """
    found = []
    for steps in turns:
        for start in range(0, len(steps) - APART + 1, APART):
            with_it = sum(steps[start : start + AFTER + 1])
            without = sum(steps[start + APART - AFTER - 1 : start + APART])
            found.append(with_it - without)
    return statistics.median(found)


# --- the four questions -----------------------------------------------------------------------------------

Goal = dict[str, str]


def goal(what: str, wanted: float, measured: float, unit: str = "x") -> Goal:
    """A line of the table of goals."""
    return {
        "goal": what,
        "wanted": f"<= {wanted:g}{unit}",
        "measured": f"{measured:.3f}{unit}",
        "met": yes_no(measured <= wanted),
    }


def slow(options: argparse.Namespace) -> tuple[list[list[str]], list[Goal], dict[str, Any]]:
    """The writer that sleeps."""
    accounts: list[str] = []
    cases: dict[str, Training] = {
        "eventloop, no writer": ours,
        "eventloop, slow writer": partial(ours, writers=lambda: [SlowWriter()], accounts=accounts),
        "by hand, no writer": partial(by_hand, tensorboard=False),
        "by hand, slow SummaryWriter": partial(by_hand, slow=True),
        "by hand, slow SummaryWriter on a bare thread": partial(by_hand, slow=True, thread=True),
    }
    return compare(cases, options, "slow writer", 1.02, 1.10, extra={"accounts": accounts})


def burning(options: argparse.Namespace) -> tuple[list[list[str]], list[Goal], dict[str, Any]]:
    """The writer that burns a CPU, in a process and on a thread."""
    work = turns()
    of_ours = partial(ours, interval=BURN_EVERY)
    cases: dict[str, Training] = {
        "eventloop, no writer": of_ours,
        "by hand, no writer": partial(by_hand, tensorboard=False),
        "eventloop, burning writer in a process": partial(
            of_ours, writers=lambda: [BurningWriter(work, "process")]
        ),
        "eventloop, burning writer on a thread": partial(
            of_ours, writers=lambda: [BurningWriter(work, "thread")]
        ),
        "by hand, burning inline": partial(by_hand, every=BURN_EVERY, burns=work),
        "by hand, burning on a bare thread": partial(by_hand, every=BURN_EVERY, burns=work, thread=True),
    }
    taken = measure(cases, options.steps, options.rounds, options.warm_up)
    bare, hand_bare, process, *_ = names = [*cases]
    found = {n: ratios(taken[n], taken[bare if n.startswith("eventloop") else hand_bare]) for n in names[2:]}
    return (
        ratio_rows(found),
        [goal("burning writer in a process: mean", 1.05, found[process][2])],
        {"ratios": found},
    )


def all_writers() -> list[Writer]:
    """What a training is usually given."""
    return [ConsoleWriter(stream=io.StringIO()), JSONLWriter(), TensorBoardWriter(), EventLogWriter()]


def everything(options: argparse.Namespace) -> tuple[list[list[str]], list[Goal], dict[str, Any]]:
    """All writers, 10 scalars in every step."""
    cases: dict[str, Training] = {
        "eventloop, no writer": partial(ours, interval=1, scalars=SCALARS),
        "eventloop, four writers": partial(ours, writers=all_writers, interval=1, scalars=SCALARS),
        "by hand, no writer": partial(by_hand, tensorboard=False),
        "by hand, three writers": partial(by_hand, everything=True),
        "by hand, three writers on a bare thread": partial(by_hand, everything=True, thread=True),
    }
    return compare(cases, options, "four writers, every step", 1.03, 1.15, extra={"scalars": SCALARS})


def compare(
    cases: dict[str, Training],
    options: argparse.Namespace,
    what: str,
    p50: float,
    p99: float,
    *,
    extra: dict[str, Any],
) -> tuple[list[list[str]], list[Goal], dict[str, Any]]:
    """Measure five cases: ours without and with, by hand without, with, and with on a thread; rows, goals and what to
    keep."""
    taken = measure(cases, options.steps, options.rounds, options.warm_up)
    bare, full, hand_bare, *hands = taken
    found = {full: ratios(taken[full], taken[bare])}
    found |= {hand: ratios(taken[hand], taken[hand_bare]) for hand in hands}
    met = [goal(f"{what}: p50", p50, found[full][0]), goal(f"{what}: p99", p99, found[full][1])]
    return ratio_rows(found), met, {"ratios": found, **extra}


def ratio_rows(found: dict[str, tuple[float, float, float]]) -> list[list[str]]:
    """Rows of a table."""
    return [[name, *(f"{ratio:.3f}x" for ratio in each)] for name, each in found.items()]


def media(options: argparse.Namespace) -> tuple[list[list[str]], list[Goal], dict[str, Any]]:
    """Images and histograms."""
    cases: dict[str, Training] = {}
    for kind in ("image", "histogram"):
        cases[f"eventloop, {kind}"] = partial(
            ours, writers=lambda: [TensorBoardWriter()], put=partial(put_ours, kind)
        )
        by_writer = partial(by_hand, put=partial(put_by_hand, kind))
        cases[f"SummaryWriter, {kind}"] = by_writer
        cases[f"SummaryWriter on a bare thread, {kind}"] = partial(by_writer, thread=True)
    steps = max(1, options.steps // APART) * APART
    taken = measure(cases, steps, options.rounds, options.warm_up)
    found = {name: added(turns) * 1e3 for name, turns in taken.items()}
    met = [
        goal(name, 5.0, milliseconds, " ms") for name, milliseconds in found.items() if "eventloop" in name
    ]
    return [[name, f"{value:+.2f} ms"] for name, value in found.items()], met, {"added_ms": found}


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    slow, burning, everything = (record[part]["ratios"] for part in ("slow", "burning", "everything"))
    (ours, hand, thread), (process, on_thread, inline, bare) = slow.values(), burning.values()
    four, three, _ = everything.values()
    added = record["media"]["added_ms"]
    return section(
        "the steps of a training with writers, beside the same loop without; by hand with torch's SummaryWriter.",
        [
            (
                f"A writer that sleeps 50 ms: median step {ours[0]:.2f}x, p99 {ours[1]:.2f}x (by hand {hand[0]:.2f}x and "
                f"{hand[1]:.0f}x; on a bare thread {thread[0]:.2f}x and {thread[1]:.2f}x)."
            ),
            (
                f"One that computes 20 ms: mean step {process[2]:.2f}x in a process, {on_thread[2]:.2f}x on a thread (by hand "
                f"{inline[2]:.2f}x inline, {bare[2]:.2f}x on a bare thread)."
            ),
            (
                f"An image of 512x512 adds {added['eventloop, image']:.1f} ms (by hand {added['SummaryWriter, image']:.0f} ms), a "
                f"histogram {added['eventloop, histogram']:.1f} ms ({added['SummaryWriter, histogram']:.1f} ms)."
            ),
            (
                f"Four writers, 10 scalars in every step: median {four[0]:.2f}x, p99 {four[1]:.2f}x (by hand, three writers: "
                f"{three[0]:.2f}x and {three[1]:.2f}x)."
            ),
        ],
        record["goals"],
        record["environment"],
    )


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="of a turn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds to leave out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = environment("torch", "tensorboard")
    slow_rows, slow_goals, slow_kept = slow(options)
    burn_rows, burn_goals, burn_kept = burning(options)
    media_rows, media_goals, media_kept = media(options)
    all_rows, all_goals, all_kept = everything(options)
    met = [*slow_goals, *burn_goals, *media_goals, *all_goals]
    columns = ["", "p50", "p99", "mean"]
    report = "\n\n".join(
        [
            f"# {(__doc__ or '').splitlines()[0]}",
            f"`{command_line('benchmarks.slow_writers')}`",
            ", ".join(f"{name} {value}" for name, value in about.items()),
            markdown_table([*met[0]], [[*each.values()] for each in met]),
            f"## A writer that sleeps 50 ms, every {EVERY} steps, beside no writer",
            markdown_table(columns, slow_rows) + f"\n\nAt the end: {slow_kept['accounts'][-1]}.",
            f"## A writer that burns {BURN_SECONDS * 1e3:g} ms of Python, every {BURN_EVERY} steps, beside no writer",
            markdown_table(columns, burn_rows),
            f"## A 512x512 image, 100,000 values: added to the call and the next {AFTER} steps",
            markdown_table(["", "added"], media_rows),
            f"## JSON lines, TensorBoard, event log and console, {SCALARS} scalars in every step, beside no writer",
            markdown_table(columns, all_rows),
        ]
    )
    record = {
        "environment": about,
        "options": {"steps": options.steps, "rounds": options.rounds},
        "goals": met,
        "slow": slow_kept,
        "burning": burn_kept,
        "media": media_kept,
        "everything": all_kept,
    }
    publish(report, record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
