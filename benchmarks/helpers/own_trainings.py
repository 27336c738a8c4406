"""The trainings that are always there: the bare loop, the loop by hand, eventloop, and how one of them takes a turn."""

from __future__ import annotations

import io
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.helpers.digits_training import EVERY, FOREVER, PEERS, Job, Lines, Training
from benchmarks.helpers.timing import NOT_INSTALLED, version_of

BARE, SYNCED, WHOLE = "bare", "bare, bytes synced beside it", "eventloop"
DISTRIBUTIONS = (
    "torch",
    "tensorboard",
    "rich",
    *dict.fromkeys(d for needs, _ in PEERS.values() for d in needs),
)
Turn = dict[str, float]
"""Mean, median and 99th percentile of a turn's steps; `wall`, the whole turn per step, from its beginning until the
background had finished; and what was left to the background, per epoch. All in seconds."""


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
    """The bare loop, beside a process that only syncs the bytes of a checkpoint to the disk each epoch.

    It shows what the machine itself takes for these bytes.
    """
    state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
    torch.save(state, directory / "size.pth")
    size = 2 * (directory / "size.pth").stat().st_size  # momentum comes with the first step
    other = subprocess.Popen(
        [sys.executable, "-c", WRITES_BYTES, str(directory), str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
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
    SYNCED: bytes_alone,
    "by hand": by_hand,
    "eventloop, hooks only": partial(eventloop, writers=False, saves=False),
    "eventloop, no checkpoint": partial(eventloop, saves=False),
    WHOLE: eventloop,
}
"""What is always there; "hooks only" is the default hooks without writer and checkpoint."""


def missing(distributions: tuple[str, ...]) -> list[str]:
    """Return those of the distributions that are not installed."""
    return [name for name in distributions if version_of(name) == NOT_INSTALLED]


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
