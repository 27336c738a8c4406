"""What does the whole default stack cost a training of ~1 ms a step?

The same MLP on scikit-learn's digits, batch 64, one torch thread: a bare loop with nothing around it; the same loop
with SummaryWriter, a JSON file, prints and torch.save by hand; eventloop with its default hooks, TensorBoard,
JSONL and console every 10 iterations and a checkpoint each epoch; pytorch-ignite with handlers for the same.
Runs are interleaved. A step is timed from one call of the train step to the next, so a checkpoint between two
steps counts; the first `--settle` seconds of each run are left out, because a training lasts longer than it takes
eventloop's checkpoint process to start (they are in `whole`).

    python -m benchmarks.digits_overhead [--epochs 500] [--rounds 7] [--json PATH] [--markdown PATH]
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._timing import command_line, environment, markdown_table, publish, version_of, yes_no

GOAL = 1.05
Run = Callable[[int, Path], list[float]]
"""Trains so many epochs with files in a directory; returns when each step began, and when the run ended."""


class Job:
    """The model, the data and the step that all engines share; the step notes when it is called."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        digits = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32) / 16.0
        data = TensorDataset(images[:1437], torch.tensor(digits.target[:1437]))
        self.loader = DataLoader(data, batch_size=64, shuffle=True)
        self.model = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )  # fmt: skip
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.began: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        """The forward pass."""
        self.began.append(perf_counter())
        inputs, target = batch
        return F.cross_entropy(self.model(inputs), target)

    def step(self, batch: Any) -> torch.Tensor:
        """Forward, backward and step."""
        loss = self.loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def bare(epochs: int, directory: Path) -> list[float]:
    """Nothing but the training."""
    job = Job()
    for _ in range(epochs):
        for batch in job.loader:
            job.step(batch)
    return [*job.began, perf_counter()]


def by_hand(epochs: int, directory: Path) -> list[float]:
    """What people write: SummaryWriter, a JSON line and a print every 10 iterations, torch.save each epoch."""
    from torch.utils.tensorboard import SummaryWriter

    job = Job()
    writer = SummaryWriter(str(directory))
    console = io.StringIO()
    iteration = 0
    with open(directory / "metrics.jsonl", "w") as lines:
        for epoch in range(epochs):
            for batch in job.loader:
                loss = job.step(batch)
                iteration += 1
                if iteration % 10 == 0:
                    value, lr = loss.item(), job.optimizer.param_groups[0]["lr"]
                    writer.add_scalar("train/loss", value, iteration)
                    writer.add_scalar("train/lr", lr, iteration)
                    lines.write(json.dumps({"step": iteration, "loss": value, "lr": lr}) + "\n")
                    print(f"epoch {epoch} iteration {iteration} loss {value:.4f} lr {lr}", file=console)
            _save_by_hand(job, directory, epoch)
    writer.close()
    return [*job.began, perf_counter()]


def _save_by_hand(job: Job, directory: Path, epoch: int) -> None:
    state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), "epoch": epoch}
    torch.save(state, directory / f"epoch_{epoch}.pth")


def eventloop(epochs: int, directory: Path) -> list[float]:
    """The default stack: seven hooks, three writers."""
    from eventloop import Trainer
    from eventloop.hooks import CheckpointHook
    from eventloop.writers import ConsoleWriter, JSONLWriter, TensorBoardWriter

    job = Job()
    trainer = Trainer(
        job.model,
        optimizer=job.optimizer,
        train_step=lambda trainer, batch: job.loss(batch),
        train_loader=job.loader,
        max_epochs=epochs,
        hooks=[CheckpointHook(interval=1, max_keep_ckpts=2)],
        writers=[ConsoleWriter(stream=io.StringIO()), JSONLWriter(), TensorBoardWriter()],
        work_dir=directory,
    )
    trainer.train()
    ended = perf_counter()
    trainer.close()
    return [*job.began, ended]


def ignite(epochs: int, directory: Path) -> list[float]:
    """pytorch-ignite with handlers that do the same."""
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver
    from ignite.handlers.tensorboard_logger import TensorboardLogger

    job = Job()
    engine = Engine(lambda engine, batch: job.step(batch).item())
    console = io.StringIO()
    every = Events.ITERATION_COMPLETED(every=10)
    engine.add_event_handler(every, lambda e: print(e.state.iteration, e.state.output, file=console))
    saver = Checkpoint(
        {"model": job.model, "optimizer": job.optimizer},
        DiskSaver(str(directory), require_empty=False), n_saved=2,
    )  # fmt: skip
    engine.add_event_handler(Events.EPOCH_COMPLETED, saver)
    logger = TensorboardLogger(log_dir=str(directory))
    logger.attach_output_handler(
        engine, event_name=every, tag="train", output_transform=lambda loss: {"loss": loss}
    )
    with open(directory / "metrics.jsonl", "w") as lines:
        engine.add_event_handler(every, lambda e: lines.write(json.dumps({"loss": e.state.output}) + "\n"))
        engine.run(job.loader, max_epochs=epochs)
    logger.close()
    return [*job.began, perf_counter()]


CASES: dict[str, Run] = {"bare": bare, "by hand": by_hand, "eventloop": eventloop}


def measure(cases: dict[str, Run], epochs: int, rounds: int) -> dict[str, list[list[float]]]:
    """Run every case once a round, each round beginning with another one; the first round is not kept."""
    taken: dict[str, list[list[float]]] = {name: [] for name in cases}
    names = [*cases]
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with tempfile.TemporaryDirectory() as directory:
                times = cases[name](epochs if turn else 2, Path(directory))
            if turn:
                taken[name].append(times)
    return taken


def figures(times: list[float], settle: float) -> dict[str, float]:
    """Mean, median and p99 of the settled steps, and the mean over the whole run, in seconds."""
    steps = [b - a for a, b in pairwise(times[:-1]) if a - times[0] >= settle]
    return {
        "mean": statistics.fmean(steps),
        "p50": statistics.median(steps),
        "p99": statistics.quantiles(steps, n=100)[98],
        "whole": (times[-1] - times[0]) / (len(times) - 1),
    }


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--settle", type=float, default=7.0, help="seconds at the start of a run to leave out"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = dict(CASES)
    if version_of("pytorch-ignite") != "not installed":
        cases["ignite"] = ignite
    taken = measure(cases, options.epochs, options.rounds)
    per_run = {name: [figures(times, options.settle) for times in runs] for name, runs in taken.items()}
    ratios = {
        name: {
            key: statistics.median(a[key] / b[key] for a, b in zip(runs, per_run["bare"], strict=True))
            for key in ("mean", "p50", "p99", "whole")
        }
        for name, runs in per_run.items()
    }
    rows = [
        [name, f"{statistics.median(r['mean'] for r in per_run[name]) * 1e3:.3f} ms"]
        + [f"{ratios[name][key]:.3f}x" for key in ("mean", "p50", "p99", "whole")]
        for name in cases
    ]
    versions = environment("torch", "tensorboard", "rich", "pytorch-ignite")
    met = ratios["eventloop"]["mean"] <= GOAL
    report = "\n\n".join(
        [
            f"# {__doc__.splitlines()[0] if __doc__ else ''}",
            f"`{command_line('benchmarks.digits_overhead')}`",
            ", ".join(f"{k} {v}" for k, v in versions.items()),
            markdown_table(["engine", "a step", "mean", "p50", "p99", "whole run"], rows),
            (
                f"Ratios to the bare loop, medians over {options.rounds} interleaved runs of {options.epochs} epochs. "
                f"Goal: mean of eventloop at most {GOAL}x: {yes_no(met)}."
            ),
        ]
    )
    record = {"environment": versions, "ratios": ratios, "runs": per_run, "goal": GOAL, "met": met}
    publish(report, record, json=options.json, markdown=options.markdown)
    sys.exit(0)


if __name__ == "__main__":
    main()
