"""What does the whole default stack cost a training of ~1 ms a step?

The same MLP on scikit-learn's digits, batch 64, one torch thread: a bare loop with nothing around it; the same loop
with SummaryWriter, a JSON file, prints and torch.save by hand; eventloop with its default hooks, TensorBoard,
JSONL and console every 10 iterations and a checkpoint each epoch; pytorch-ignite with handlers for the same.

The machine's speed changes within seconds, so all trainings go on at the same time in turns of a few epochs, and a
turn is compared with the bare loop's turn of the same round. Where a model lies in memory makes it faster or slower
by some percent, so everything is built anew several times. What a turn left to the background is finished, untimed,
before the next one's, so that nobody works in another's time. The first rounds, in which eventloop's checkpoint
process starts, are left out.

    python -m benchmarks.digits_overhead [--epochs 15] [--sessions 6] [--json PATH] [--markdown PATH]
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
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
FOREVER = 1_000_000
Training = Callable[["Job", int, Path], Iterator[None]]
"""Trains so many epochs at each `next`; a second `next` before the following turn finishes what was left over."""


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
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
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


def bare(job: Job, epochs: int, directory: Path) -> Iterator[None]:
    """Nothing but the training."""
    while True:
        for _ in range(epochs):
            for batch in job.loader:
                job.step(batch)
        yield
        yield


def by_hand(job: Job, epochs: int, directory: Path) -> Iterator[None]:
    """What people write: SummaryWriter, a JSON line and a print every 10 iterations, torch.save each epoch."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(directory))
    console = io.StringIO()
    iteration = 0
    with open(directory / "metrics.jsonl", "w") as lines:
        while True:
            for _ in range(epochs):
                for batch in job.loader:
                    loss = job.step(batch)
                    iteration += 1
                    if iteration % 10 == 0:
                        value, lr = loss.item(), job.optimizer.param_groups[0]["lr"]
                        writer.add_scalar("train/loss", value, iteration)
                        writer.add_scalar("train/lr", lr, iteration)
                        lines.write(json.dumps({"step": iteration, "loss": value, "lr": lr}) + "\n")
                        print(f"iteration {iteration} loss {value:.4f} lr {lr}", file=console)
                state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
                torch.save(state, directory / f"iter_{iteration % 3}.pth")
            yield
            writer.flush()
            yield


def eventloop(job: Job, epochs: int, directory: Path) -> Iterator[None]:
    """The default stack: seven hooks, three writers."""
    from eventloop import Trainer
    from eventloop.hooks import CheckpointHook
    from eventloop.writers import ConsoleWriter, JSONLWriter, TensorBoardWriter

    trainer = Trainer(
        job.model,
        optimizer=job.optimizer,
        max_epochs=FOREVER,
        hooks=[CheckpointHook(interval=1, max_keep_ckpts=2)],
        writers=[ConsoleWriter(stream=io.StringIO()), JSONLWriter(), TensorBoardWriter()],
        work_dir=directory,
    )
    running = trainer.epochs()
    while True:
        for _ in islice(running, epochs):
            for batch in trainer.batches(job.loader):
                trainer.outputs = {"loss": job.loss(batch)}
        yield
        trainer.bus.flush()
        yield


def ignite(job: Job, epochs: int, directory: Path) -> Iterator[None]:
    """pytorch-ignite with handlers that do the same."""
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver
    from ignite.handlers.tensorboard_logger import TensorboardLogger

    engine = Engine(lambda engine, batch: job.step(batch).item())
    console = io.StringIO()
    every = Events.ITERATION_COMPLETED(every=10)
    engine.add_event_handler(every, lambda e: print(e.state.iteration, e.state.output, file=console))
    disk = DiskSaver(str(directory), require_empty=False)
    saver = Checkpoint({"model": job.model, "optimizer": job.optimizer}, disk, n_saved=2)
    engine.add_event_handler(Events.EPOCH_COMPLETED, saver)
    logger = TensorboardLogger(log_dir=str(directory))
    logger.attach_output_handler(engine, every, tag="train", output_transform=lambda loss: {"loss": loss})
    done = 0
    with open(directory / "metrics.jsonl", "w") as lines:
        engine.add_event_handler(every, lambda e: lines.write(json.dumps({"loss": e.state.output}) + "\n"))
        while True:
            done += epochs
            engine.run(job.loader, max_epochs=done)
            yield
            logger.writer.flush()
            yield


def measure(
    cases: dict[str, Training], epochs: int, rounds: int, warm_up: int
) -> dict[str, list[list[float]]]:
    """The step times of every turn, by case; each round begins with another case."""
    taken: dict[str, list[list[float]]] = {name: [] for name in cases}
    names = [*cases]
    with tempfile.TemporaryDirectory() as directory:
        jobs, trainings = {}, {}
        for name in names:
            (Path(directory) / name).mkdir()
            jobs[name] = Job()
            trainings[name] = cases[name](jobs[name], epochs, Path(directory) / name)
        for turn in range(rounds + warm_up):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                job = jobs[name]
                job.began.clear()
                next(trainings[name])
                ended = perf_counter()
                next(trainings[name])
                if turn >= warm_up:
                    taken[name].append([b - a for a, b in pairwise([*job.began, ended])])
        for training in trainings.values():
            training.close()  # type: ignore[attr-defined]
    return taken


def figures(steps: list[float]) -> dict[str, float]:
    """Mean, median and 99th percentile, in seconds."""
    return {
        "mean": statistics.fmean(steps),
        "p50": statistics.median(steps),
        "p99": statistics.quantiles(steps, n=100)[98],
    }


def ratios_to_bare(turns: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds of each figure over the bare loop's in the same round."""
    return {
        name: {
            key: statistics.median(a[key] / b[key] for a, b in zip(own, turns["bare"], strict=True))
            for key in ("mean", "p50", "p99")
        }
        for name, own in turns.items()
    }


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--epochs", type=int, default=15, help="of a turn")
    parser.add_argument("--sessions", type=int, default=6, help="times everything is built anew")
    parser.add_argument("--rounds", type=int, default=8, help="of a session")
    parser.add_argument("--warm-up", type=int, default=8, help="rounds of a session to leave out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases: dict[str, Training] = {"bare": bare, "by hand": by_hand, "eventloop": eventloop}
    if version_of("pytorch-ignite") != "not installed":
        cases["ignite"] = ignite
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for _ in range(options.sessions):
        for name, each in measure(cases, options.epochs, options.rounds, options.warm_up).items():
            turns[name] += [figures(steps) for steps in each]
    ratios = ratios_to_bare(turns)
    rows = [
        [name, f"{statistics.median(t['mean'] for t in turns[name]) * 1e3:.3f} ms"]
        + [f"{ratio:.3f}x" for ratio in ratios[name].values()]
        for name in cases
    ]
    versions = environment("torch", "tensorboard", "rich", "pytorch-ignite")
    met = ratios["eventloop"]["mean"] <= GOAL
    lines = [
        f"# {__doc__.splitlines()[0] if __doc__ else ''}",
        f"`{command_line('benchmarks.digits_overhead')}`",
        ", ".join(f"{k} {v}" for k, v in versions.items()),
        markdown_table(["engine", "a step", "mean", "p50", "p99"], rows),
        f"Ratios to the bare loop in the same round, medians over {options.sessions} sessions of {options.rounds} "
        + f"rounds of {options.epochs} epochs. Goal: mean of eventloop at most {GOAL}x: {yes_no(met)}.",
    ]
    record = {"environment": versions, "ratios": ratios, "turns": turns, "goal": GOAL, "met": met}
    publish("\n\n".join(lines), record, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
