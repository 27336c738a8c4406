"""What does a run pay for being watched, and what does watching it take?

    python -m benchmarks.living --json benchmarks/results/living.json

- heartbeat: the CPU time of the heartbeat's thread, over the wall time of a training that computes without a pause, so
  that the thread has to wait for the interpreter. The thread's own clock is read at its last call.
- training thread: its CPU time, over that of the same run without what is done each second, of the same round
- watched steps: the 99th percentile of the time from one iteration to the next while `eventloop watch --json` reads the
  run, over that of a run that nobody watches, of the same round
- reader: the CPU time of a read of a run with 100,000 rows, 5 scalars each, to which 20 rows were added since the last
  one, at one read a second; and the time of the first read
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import msgspec
import torch
from torch import nn

from benchmarks.helpers.in_short import section
from benchmarks.helpers.timing import command_line, environment, markdown_table, publish, yes_no
from eventloop import Trainer
from eventloop.eventlog.jsonl import FILE_NAME
from eventloop.events import AfterTrainIter
from eventloop.watching import RunReader
from eventloop.writers import JSONLWriter

ROWS, ADDED = 100_000, 20
HEARTBEAT_GOAL, READER_GOAL = 0.1, 5.0
"""The limits in percent of one CPU."""
STEP_GOAL = 1.02
"""The limit of a ratio that is to be 1.00, with what runs differ by."""
WATCH_FROM = 100
"""The iteration at which the watching program is started; the next ones are measured."""


class Run(msgspec.Struct):
    """The times of one run in seconds: by the clock, and the CPU time of the training thread and the heartbeat's."""

    wall: float
    training: float
    beat: float


def build(directory: Path, iterations: int) -> Trainer:
    """Build a trainer whose steps take some milliseconds of computation."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 70), nn.ReLU(), nn.Linear(70, 1))
    inputs, filler = torch.randn(4, 70), torch.randn(60, 60)

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        for _ in range(40):
            torch.mm(filler, filler)
        loss: torch.Tensor = model(inputs).square().mean()
        return loss

    return Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        train_step=step,
        train_loader=[0] * iterations,
        max_epochs=1,
        writers=[JSONLWriter()],
        work_dir=directory,
    )


def train(directory: Path, iterations: int, *, watched: bool) -> Run:
    """Train in this process, with or without what is done each second."""
    trainer = build(directory, iterations)
    beats: list[float] = []
    trainer.ownership.each_second[:] = trainer.ownership.each_second if watched else []
    trainer.ownership.each_second.append(lambda: beats.append(time.thread_time()))
    began, used = perf_counter(), time.thread_time()
    trainer.train()
    wall, training = perf_counter() - began, time.thread_time() - used
    trainer.close()
    return Run(wall, training, beats[-1])


def heartbeat(rounds: int, iterations: int) -> dict[str, float]:
    """Return the percentage of the heartbeat's thread, and the ratio of the training thread's CPU times."""
    runs: dict[bool, list[Run]] = {True: [], False: []}
    for turn in range(rounds):
        for watched in (turn % 2 == 0, turn % 2 == 1):
            with tempfile.TemporaryDirectory() as directory:
                runs[watched].append(train(Path(directory), iterations, watched=watched))
    return {
        "seconds": statistics.median(run.wall for run in runs[True]),
        "percent": statistics.median(run.beat / run.wall * 100 for run in runs[True]),
        "percent_without": statistics.median(run.beat / run.wall * 100 for run in runs[False]),
        "ratio": statistics.median(
            a.training / b.training for a, b in zip(runs[True], runs[False], strict=True)
        ),
    }


def watched_steps(rounds: int, iterations: int) -> dict[str, float]:
    """Return the 99th percentile of a step in ms, watched and not, and the median of the ratios."""
    taken: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(rounds):
        for watched in (turn % 2 == 0, turn % 2 == 1):
            taken[watched].append(p99_ms(iterations, watched=watched))
    return {
        "watched_ms": statistics.median(taken[True]),
        "alone_ms": statistics.median(taken[False]),
        "ratio": statistics.median(a / b for a, b in zip(taken[True], taken[False], strict=True)),
    }


def p99_ms(iterations: int, *, watched: bool) -> float:
    """Return the 99th percentile of the steps of a training, in ms."""
    ends: list[float] = []
    watching: list[subprocess.Popen[bytes]] = []

    def record(event: AfterTrainIter) -> None:
        if event.iter == WATCH_FROM and watched:
            command = [sys.executable, "-m", "eventloop", "watch", directory, "--json"]
            watching.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            assert watching[0].stdout is not None
            watching[0].stdout.readline()
        if event.iter >= WATCH_FROM:
            ends.append(perf_counter())

    with tempfile.TemporaryDirectory() as directory:
        trainer = build(Path(directory), iterations)
        trainer.bus.subscribe(record, AfterTrainIter, priority="LOWEST")
        trainer.train()
        for watcher in watching:
            watcher.kill()
            watcher.communicate()
    return statistics.quantiles((b - a for a, b in pairwise(ends)), n=100)[98] * 1e3


def reader(reads: int) -> dict[str, float]:
    """Return the seconds of the first read, and the percentage of one CPU at one read a second."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, FILE_NAME)
        path.write_bytes(_rows(1, ROWS))
        following = RunReader(directory)
        first = _cpu(following.read)
        taken = []
        for turn in range(reads):
            with path.open("ab") as file:
                file.write(_rows(ROWS + 1 + turn * ADDED, ADDED))
            taken.append(_cpu(following.read))
        megabytes = path.stat().st_size / 1e6
    return {"first": first, "percent": statistics.median(taken) * 100, "megabytes": megabytes}


def _rows(begin: int, count: int) -> bytes:
    rows = (
        {
            "mode": "train",
            "step": step,
            "iter": step - 1,
            "epoch": 0,
            "loss": 1 / step,
            "lr": 0.1,
            "time": 0.01,
            "data_time": 0.001,
            "step_time": 0.008,
        }
        for step in range(begin, begin + count)
    )
    return msgspec.json.Encoder().encode_lines([*rows])


def _cpu(do: Callable[[], object]) -> float:
    began = process_time()
    do()
    return process_time() - began


def goals(record: dict[str, Any]) -> list[list[str]]:
    """Return the goals and what was measured."""
    beat, read = record["heartbeat"]["percent"], record["reader"]["percent"]
    steps = record["watched_steps"]["ratio"]
    return [
        [
            "p99 of a watched step, to one that is not",
            f"<= {STEP_GOAL}x",
            f"{steps:.3f}x",
            yes_no(steps <= STEP_GOAL),
        ],
        [
            "CPU of the heartbeat, of a run",
            f"<= {HEARTBEAT_GOAL} %",
            f"{beat:.3f} %",
            yes_no(beat <= HEARTBEAT_GOAL),
        ],
        [
            "CPU of a reader, of one CPU",
            f"<= {READER_GOAL:g} %",
            f"{read:.2f} %",
            yes_no(read <= READER_GOAL),
        ],
    ]


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page."""
    beat, read = record["heartbeat"], record["reader"]
    return section(
        f"a training of {beat['seconds']:.0f} s with and without its heartbeat, and a reader of {ROWS:,} rows.",
        [
            f"The heartbeat's thread takes {beat['percent']:.3f} % of a run, on its own thread.",
            f"The training thread takes {beat['ratio']:.3f} of its CPU time without a heartbeat.",
            f"The 99th percentile of a step is {record['watched_steps']['ratio']:.3f} of one that nobody watches.",
            f"A read each second takes {read['percent']:.2f} % of one CPU; the first one {read['first']:.2f} s.",
        ],
        [dict(zip(("goal", "wanted", "measured", "met"), row, strict=True)) for row in goals(record)],
        record["environment"],
    )


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--iterations", type=int, default=4000, help="of a run")
    parser.add_argument("--reads", type=int, default=200)
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    options = parser.parse_args()
    beat, read = heartbeat(options.rounds, options.iterations), reader(options.reads)
    steps = watched_steps(options.rounds, options.iterations)
    about = {**environment("torch", "msgspec"), "rounds": f"{options.rounds}, medians"}
    record = {"environment": about, "heartbeat": beat, "watched_steps": steps, "reader": read}
    rows = [
        ["heartbeat's thread", f"{beat['percent']:.4f} % of a run"],
        ["the same thread without the heartbeat", f"{beat['percent_without']:.4f} % of a run"],
        ["training thread, to the same without", f"{beat['ratio']:.4f}x"],
        ["p99 of a step, watched", f"{steps['watched_ms']:.2f} ms"],
        ["p99 of a step, not watched", f"{steps['alone_ms']:.2f} ms"],
        ["first read", f"{read['first']:.2f} s of CPU, {read['megabytes']:.1f} MB"],
        ["later reads, one a second", f"{read['percent']:.2f} % of one CPU"],
    ]
    report = "\n\n".join(
        [
            f"# {(__doc__ or '').splitlines()[0]}\n\n    {command_line('benchmarks.living')}",
            "\n".join(f"- {name}: {value}" for name, value in about.items()),
            markdown_table(("goal", "wanted", "measured", "met"), goals(record)),
            markdown_table(("what", "takes"), rows),
        ]
    )
    publish(report, record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
