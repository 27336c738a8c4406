"""What does a training gain whose checkpoints another process validates, and what does it lose?

    python -m benchmarks.async_validation --json benchmarks/results/async_validation.json

A training of 80 iterations an epoch, with a validation of 60 batches after each epoch: without the validations, with them
within the training, and with `AsyncValidationHook`, whose child process computes on another CPU. Every run is a process
of its own, and a round has one run of each way.

- steps: the median time from one iteration to the next, over that of the run without validations of the same round
- gain: by how much the run with the hook is shorter than with validations within, over the time of these validations;
  the run with the hook ends when the metrics of its last checkpoint have come
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.helpers.in_short import section
from benchmarks.helpers.timing import command_line, environment, markdown_table, publish, yes_no
from eventloop import Trainer
from eventloop.assembly.evaluator_run import builds_evaluator
from eventloop.evaluation.schedule import Never
from eventloop.events import AfterTrainIter
from eventloop.hooks import AsyncValidationHook, CheckpointHook

NONE, WITHIN, ASIDE = "no validation", "validations within", "AsyncValidationHook"
WAYS = (NONE, WITHIN, ASIDE)
STEPS, BATCHES = 80, 60
STEP_GOAL, GAIN_GOAL = 1.02, 0.9


class Run(msgspec.Struct):
    """What one run took: all of it in seconds, and the median step in ms."""

    wall: float
    step_ms: float


def build(way: str = NONE, epochs: int = 1, directory: str | None = None) -> Trainer:
    """Build the trainer, also in the process that validates, which then computes on a CPU of its own."""
    cpus = sorted(os.sched_getaffinity(0))
    if builds_evaluator():
        os.sched_setaffinity(0, {cpus[0]})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10))
    batch = (torch.randn(256, 512), torch.randint(0, 10, (256,)))
    hooks: list[Any] = [
        CheckpointHook(interval=1, max_keep_ckpts=2, save_best="loss" if way != NONE else None)
    ]
    if way == ASIDE:
        hooks.append(AsyncValidationHook("benchmarks.async_validation:build"))
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        loss_fn=F.cross_entropy,
        train_loader=[batch] * STEPS,
        val_loader=[batch] * BATCHES,
        max_epochs=epochs,
        hooks=hooks,
        writers=[],
        work_dir=directory,
    )
    if way == NONE:
        trainer.schedule = Never()
    return trainer


def train(way: str, epochs: int, directory: str) -> Run:
    """Train in this process; the training thread computes on the last CPU."""
    trainer = build(way, epochs, directory)
    ends: list[tuple[int, float]] = []

    def record(event: AfterTrainIter) -> None:
        if not ends:
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # of this thread alone
        ends.append((event.epoch, perf_counter()))

    trainer.bus.subscribe(record, AfterTrainIter, priority="LOWEST")
    began = perf_counter()
    trainer.train()
    wall = perf_counter() - began
    steps = [b - a for (first, a), (second, b) in pairwise(ends) if first == second]
    return Run(wall, statistics.median(steps) * 1e3)


def run(way: str, options: argparse.Namespace) -> Run:
    """Return what one run takes, in a process of its own."""
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        command = [
            sys.executable,
            "-m",
            "benchmarks.async_validation",
            "--epochs",
            str(options.epochs),
            "--directory",
            directory,
            "--way",
            way,
        ]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return msgspec.json.decode(printed.splitlines()[-1], type=Run)


def figures(taken: dict[str, list[Run]]) -> dict[str, dict[str, float]]:
    """Return, by way, the seconds of a run and its step, and the ratios: medians over the rounds."""
    gains = [
        (within.wall - aside.wall) / (within.wall - none.wall)
        for none, within, aside in zip(*(taken[way] for way in WAYS), strict=True)
    ]
    return {
        way: {
            "seconds": statistics.median(each.wall for each in runs),
            "step_ms": statistics.median(each.step_ms for each in runs),
            "steps": statistics.median(a.step_ms / b.step_ms for a, b in zip(runs, taken[NONE], strict=True)),
            "gain": statistics.median(gains) if way == ASIDE else 0.0,
        }
        for way, runs in taken.items()
    }


def goals(record: dict[str, Any]) -> list[list[str]]:
    """Return the goals, and what was measured."""
    ours = record["ways"][ASIDE]
    return [
        [
            "steps, to no validation",
            f"<= {STEP_GOAL}x",
            f"{ours['steps']:.3f}x",
            yes_no(ours["steps"] <= STEP_GOAL),
        ],
        [
            "gain, of the validations",
            f">= {GAIN_GOAL}",
            f"{ours['gain']:.3f}",
            yes_no(ours["gain"] >= GAIN_GOAL),
        ],
    ]


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    ways = record["ways"]
    return section(
        f"a training of {STEPS} steps an epoch, with a validation of {BATCHES} batches after each epoch.",
        [
            (
                f"The run takes {ways[ASIDE]['seconds']:.1f} s with AsyncValidationHook, "
                f"{ways[WITHIN]['seconds']:.1f} s with validations within, {ways[NONE]['seconds']:.1f} s without."
            ),
            f"A step takes {ways[ASIDE]['steps']:.3f} of its time without validations.",
        ],
        [dict(zip(("goal", "wanted", "measured", "met"), row, strict=True)) for row in goals(record)],
        record["environment"],
    )


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=100, help="of a run")
    parser.add_argument("--directory", type=Path, help="on the disk to write to; by default a temporary one")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    options = parser.parse_args()
    if options.way:
        print(msgspec.json.encode(train(options.way, options.epochs, str(options.directory))).decode())
        return
    taken: dict[str, list[Run]] = defaultdict(list)
    for turn in range(options.rounds):
        for way in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:
            taken[way].append(run(way, options))
    ways = figures({way: taken[way] for way in WAYS})
    about = {
        **environment("torch", "msgspec"),
        "rounds": f"{options.rounds}, medians; {options.epochs} epochs",
    }
    record = {"environment": about, "ways": ways}
    rows = [
        [way, f"{each['seconds']:.1f} s", f"{each['step_ms']:.2f} ms", f"{each['steps']:.3f}x"]
        for way, each in ways.items()
    ]
    report = "\n\n".join(
        [
            f"# {(__doc__ or '').splitlines()[0]}\n\n    {command_line('benchmarks.async_validation')}",
            "\n".join(f"- {name}: {value}" for name, value in about.items()),
            markdown_table(("goal", "wanted", "measured", "met"), goals(record)),
            markdown_table(("way", "run", "step", "step, to no validation"), rows),
        ]
    )
    publish(report, record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
