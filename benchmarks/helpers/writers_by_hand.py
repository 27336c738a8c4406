"""What people write by hand in the job of `slow_writers`: torch's SummaryWriter, a JSON line and a print, inline or on a
thread."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from benchmarks.helpers.burning_writer import spin
from benchmarks.helpers.training_step import Steps

EVERY = 10
"""Steps from one slow write to the next."""
SLOW_SECONDS = 0.05
SCALARS = 10
Training = Callable[[int, Path], Iterator[list[float]]]
"""Trains so many steps at each `next` and yields when each began, and the end; a second `next` finishes the rest."""
Put = Callable[[Any, int], None]


class Job(Steps):
    """A perceptron and its data. A step takes one or two milliseconds on one core, so that a write every 10 steps is more
    than a slow disk can take."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(128, 192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, 10)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=0.9)
        self.batches = [(torch.rand(64, 128), torch.randint(10, (64,)))] * steps


def nothing(target: Any, step: int) -> None:
    """Put no image and no histogram."""


def by_hand(
    steps: int,
    directory: Path,
    *,
    slow: bool = False,
    everything: bool = False,
    tensorboard: bool = True,
    thread: bool = False,
    put: Put = nothing,
    every: int = EVERY,
    burns: int = 0,
) -> Iterator[list[float]]:
    """A loop with torch's SummaryWriter, whose file may be slow; `everything`: a JSON line and a print too; `thread`: all of
    it by one thread of an executor, which reads the values too; `burns`: with so many turns of Python for each value."""
    from torch.utils.tensorboard import SummaryWriter

    job, iteration = Job(steps), 0
    writer = SummaryWriter(str(directory)) if tensorboard else None
    if slow and writer is not None:
        writer.add_scalar("loss", 0.0, 0)
        make_slow(writer)
    console, pool = io.StringIO(), ThreadPoolExecutor(1) if thread else None
    medium = writer if pool is None else OnThread(pool, writer)

    def write(iteration: int, loss: torch.Tensor) -> None:
        assert writer is not None
        if not everything:
            writer.add_scalar("loss", loss.item(), iteration)
            spin(burns)
            return
        values = {f"scalar_{i}": (loss * i).item() for i in range(SCALARS)}
        for name, value in values.items():
            writer.add_scalar(name, value, iteration)
        lines.write(json.dumps({"step": iteration, **values}) + "\n")
        print(iteration, *(f"{name}: {value:.4f}" for name, value in values.items()), file=console)

    with open(directory / "metrics.jsonl", "w") as lines:
        while True:
            began: list[float] = []
            for number, batch in enumerate(job.batches):
                began.append(perf_counter())
                put(medium, number)
                loss = job.step(batch)
                iteration += 1
                if writer is None or not (everything or iteration % every == 0):
                    continue
                if pool is None:
                    write(iteration, loss)
                else:
                    pool.submit(write, iteration, loss)
            yield [*began, perf_counter()]
            if pool is not None:
                pool.submit(nothing, None, 0).result()  # it comes after all of them
            if writer is not None:
                writer.flush()
            yield []


class OnThread:
    """The methods of a SummaryWriter for images and histograms, called by the thread of an executor."""

    def __init__(self, pool: ThreadPoolExecutor, writer: Any) -> None:
        self._pool, self._writer = pool, writer

    def add_image(self, name: str, image: Any) -> None:
        """Let the executor's thread add the image."""
        self._pool.submit(self._writer.add_image, name, image)

    def add_histogram(self, name: str, values: Any) -> None:
        """Let the executor's thread add the histogram."""
        self._pool.submit(self._writer.add_histogram, name, values)


def make_slow(writer: Any) -> None:
    """Let each record that reaches the file take as long as with the slow writer."""
    records = writer.file_writer.event_writer._async_writer._writer
    write = records.write

    def slowly(data: bytes) -> None:
        time.sleep(SLOW_SECONDS)
        write(data)

    records.write = slowly
