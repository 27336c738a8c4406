"""What does a small checkpoint cost: CPU of all processes, and time of the run?

    python -m benchmarks.small_checkpoints --json benchmarks/results/small_checkpoints.json

A model with momentum, 40 KB together, is trained by iterations of 1 ms, with a checkpoint after each 28. Every run is a
process of its own, and a round has one run of each way: no checkpoint, `torch.save` with fsync on the training thread,
and our CheckpointHook.

- CPU: of the training process and its children, less that of the run without checkpoints, over their number. The
  iterations sleep, so that their own work is not in it. The start of the saver's process is in it.
- cost: the time of a run, in which the iterations compute, over that of the run without checkpoints of the same round
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch import nn

from benchmarks.helpers.checkpoint_ways import write
from benchmarks.helpers.in_short import section
from benchmarks.helpers.timing import command_line, environment, markdown_table, publish, yes_no
from eventloop import Trainer
from eventloop.events import AfterTrainIter
from eventloop.hooks import CheckpointHook

NONE, SYNCHRONOUS, OURS = "no checkpoint", "torch.save + fsync", "eventloop"
WAYS = (NONE, SYNCHRONOUS, OURS)
INTERVAL, STEP_SECONDS = 28, 0.001
CPU_GOAL, COST_GOAL = 1.5, 1.05


class Run(msgspec.Struct):
    """What one run took, in seconds."""

    wall: float
    cpu: float


def train(way: str, iterations: int, directory: Path, *, computes: bool) -> Run:
    """Train in this process, and measure until everything is durable."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 70), nn.ReLU(), nn.Linear(70, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs, filler = torch.randn(4, 70), torch.randn(40, 40)

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        until = perf_counter() + STEP_SECONDS
        if not computes:
            time.sleep(STEP_SECONDS)
        while perf_counter() < until:
            torch.mm(filler, filler)
        loss: torch.Tensor = model(inputs).square().mean()
        return loss

    default: dict[str, Any] = dict.fromkeys(("preemption", "garbage_collection", "logger"))
    if way != OURS:
        default["checkpoint"] = None
    hooks = [CheckpointHook(interval=INTERVAL, by_epoch=False, max_keep_ckpts=3)] if way == OURS else []
    trainer = Trainer(
        model,
        optimizer=optimizer,
        train_step=step,
        train_loader=[0] * iterations,
        max_epochs=1,
        hooks=hooks,
        default_hooks=default,
        writers=[],
        work_dir=directory,
    )
    if way == SYNCHRONOUS:

        def save(event: AfterTrainIter) -> None:
            state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
            write(state, directory / f"{event.iter % (3 * INTERVAL)}.pth")

        trainer.bus.subscribe(save, AfterTrainIter, priority=90, every=INTERVAL)
    began, used = perf_counter(), cpu()
    trainer.train()
    trainer.close()
    return Run(perf_counter() - began, cpu() - used)


def cpu() -> float:
    """Return the seconds of CPU of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run(way: str, options: argparse.Namespace, *, computes: bool) -> Run:
    """Return what one run takes, in a process of its own."""
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        command = [
            sys.executable,
            "-m",
            "benchmarks.small_checkpoints",
            "--iterations",
            str(options.iterations),
            "--directory",
            directory,
            "--way",
            way,
            *(["--computes"] if computes else []),
        ]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return msgspec.json.decode(told.splitlines()[-1], type=Run)


def figures(taken: dict[str, dict[bool, list[Run]]], checkpoints: int) -> dict[str, dict[str, float]]:
    """Return, by way, the CPU in ms that a checkpoint takes, and the ratio of a run's time.

    Both are medians over the rounds, compared with the run without checkpoints of the same round.
    """
    plain = taken[NONE]
    return {
        way: {
            "cpu_ms": statistics.median(
                (a.cpu - b.cpu) / checkpoints * 1e3 for a, b in zip(runs[False], plain[False], strict=True)
            ),
            "cost": statistics.median(a.wall / b.wall for a, b in zip(runs[True], plain[True], strict=True)),
        }
        for way, runs in taken.items()
    }


def goals(record: dict[str, Any]) -> list[list[str]]:
    """Return the goals beside what was measured."""
    ours = record["ways"][OURS]
    return [
        [
            "CPU of a checkpoint, ms",
            f"<= {CPU_GOAL}",
            f"{ours['cpu_ms']:.2f}",
            yes_no(ours["cpu_ms"] <= CPU_GOAL),
        ],
        [
            "time of the run, to none",
            f"<= {COST_GOAL}x",
            f"{ours['cost']:.3f}x",
            yes_no(ours["cost"] <= COST_GOAL),
        ],
    ]


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    ours, sync = record["ways"][OURS], record["ways"][SYNCHRONOUS]
    return section(
        f"a training of 1 ms a step with a checkpoint of 40 KB after each {INTERVAL} steps.",
        [
            (
                f"A durable checkpoint of eventloop takes {ours['cpu_ms']:.1f} ms of CPU in all processes; "
                f"torch.save and fsync take {sync['cpu_ms']:.1f} ms."
            ),
            f"The run takes {ours['cost']:.3f} of its time without; with torch.save and fsync {sync['cost']:.3f}.",
        ],
        [dict(zip(("goal", "wanted", "measured", "met"), row, strict=True)) for row in goals(record)],
        record["environment"],
    )


def measure(options: argparse.Namespace) -> dict[str, dict[bool, list[Run]]]:
    """Run every way in every round, each round beginning with another one."""
    taken: dict[str, dict[bool, list[Run]]] = {way: defaultdict(list) for way in WAYS}
    for turn in range(options.rounds):
        for computes in (False, True):
            for way in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:
                taken[way][computes].append(run(way, options, computes=computes))
    return taken


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--iterations", type=int, default=100 * INTERVAL, help="of a run")
    parser.add_argument("--directory", type=Path, help="on the disk to write to; by default a temporary one")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--computes", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    options = parser.parse_args()
    if options.way:
        done = train(options.way, options.iterations, options.directory, computes=options.computes)
        print(msgspec.json.encode(done).decode())
        return
    ways = figures(measure(options), options.iterations // INTERVAL)
    about = {**environment("torch", "msgspec"), "rounds": f"{options.rounds}, medians"}
    record = {"environment": about, "ways": ways}
    rows = [[way, f"{f['cpu_ms']:.2f} ms", f"{f['cost']:.3f}x"] for way, f in ways.items()]
    report = "\n\n".join(
        [
            f"# {(__doc__ or '').splitlines()[0]}\n\n    {command_line('benchmarks.small_checkpoints')}",
            "\n".join(f"- {name}: {value}" for name, value in about.items()),
            markdown_table(("goal", "wanted", "measured", "met"), goals(record)),
            markdown_table(("way", "CPU of a checkpoint", "time of the run, to none"), rows),
        ]
    )
    publish(report, record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
