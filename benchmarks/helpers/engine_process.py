"""Run one engine, or one way to dispatch, in a process of its own that works when it is asked to.

    python -m benchmarks.helpers.engine_process '{"type": "Training", "engine": "Lightning", ...}'

Each line on its standard input asks for a turn; the answer is a JSON object on the standard output, which whatever
the engine prints does not reach. A first line comes by itself, once the engine is set up; one with the key `failed`
says why it is no longer there.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, process_time
from typing import BinaryIO

import msgspec
import torch
import torch.nn.functional as F

from benchmarks.helpers import peer_dispatch
from benchmarks.helpers.digits_training import IMAGES, PEERS, Job
from benchmarks.helpers.dispatch import EVENT, dispatch_cases
from benchmarks.helpers.own_trainings import OURS, take_turn
from benchmarks.helpers.timing import measure, pinned, statement

BUS, BUS_READY = "eventloop bus.emit, event built too", "eventloop bus.emit, event ready"
OWN_CASES = {BUS: "bus.emit", BUS_READY: "bus.emit, ready"}
TWIN = ", second process"
"""Behind the name of an engine that there already is: shows how much two processes differ that do the same."""
INNER_ROUNDS = 5
"""Of a dispatch turn, in which the plain loop and the system take turns."""


class Size(msgspec.Struct, frozen=True):
    """The sizes of a job, which decide how long a step takes."""

    batch_size: int
    width: int
    epoch_length: int

    def job(self) -> Job:
        """The model, the data and the step; the same in every process."""
        return Job(self.batch_size, self.width, self.epoch_length)


class Training(msgspec.Struct, frozen=True, tag=True):
    """To train so many epochs a turn, with an engine of `helpers/digits_training.py` or `digits_overhead`."""

    engine: str
    size: Size
    epochs: int

    def turns(self, directory: Path) -> Iterator[dict[str, float]]:
        """Train; yields nothing at first, then what each turn took, in seconds, and the loss it ended with."""
        job = self.size.job()
        engine = self.engine.removesuffix(TWIN)
        train = OURS[engine] if engine in OURS else PEERS[engine][1]
        running = train(job, self.epochs, directory)
        try:
            yield {}
            while True:
                yield {**take_turn(job, running, self.epochs), "loss": loss(job)}
        finally:
            running.close()  # type: ignore[attr-defined]


class Dispatch(msgspec.Struct, frozen=True, tag=True):
    """To announce an event to handlers that do nothing: a plain loop, and a system of `helpers/peer_dispatch.py` or the bus."""

    system: str
    handlers: int
    number: int

    def turns(self, directory: Path) -> Iterator[dict[str, float]]:
        """Announce; yields nothing at first, then what each turn took, in nanoseconds, and the ratio."""
        plain, *own = dispatch_cases(self.handlers, self.number)
        if self.system in OWN_CASES:
            case = next(c for c in own if c.name == f"{OWN_CASES[self.system]} {self.handlers}")
        else:
            source, names = peer_dispatch.PEERS[self.system][1](self.handlers, EVENT)
            case = statement(self.system, source, self.number, names)
        yield {}
        with pinned():
            while True:
                taken = measure([plain, case], rounds=INNER_ROUNDS, warm_up=1)
                yield {
                    "plain": taken[plain.name].ns,
                    "own": taken[case.name].ns,
                    "ratio": taken[case.name].ratio_to(taken[plain.name]),
                }


Task = Training | Dispatch


def loss(job: Job) -> float:
    """Return the loss over all images; engines that have trained alike have the same."""
    images, target = (tensor[:IMAGES] for tensor in job.loader.dataset.tensors)  # type: ignore[attr-defined]
    with torch.no_grad():
        return float(F.cross_entropy(job.model(images), target))


def private_stdout() -> BinaryIO:
    """Return standard output for the answers, and discard what anything else prints from now on."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return answers


def serve(task: Task, directory: Path) -> Iterator[dict[str, float]]:
    """Yield the figures of a turn for each line on standard input, after one for the set-up.

    `idle_cpu` is the share of a CPU that this process used while it waited for the line.
    """
    turns = task.turns(directory)
    try:
        yield next(turns)
        while True:
            cpu, clock = process_time(), perf_counter()
            if not sys.stdin.readline():
                return
            idle = (process_time() - cpu) / (perf_counter() - clock)
            yield {**next(turns), "idle_cpu": idle}
    finally:
        turns.close()  # type: ignore[attr-defined]


def main() -> None:
    """Work until the standard input ends."""
    task = msgspec.json.decode(sys.argv[1], type=Task)
    torch.set_num_threads(1)
    answers = private_stdout()
    with tempfile.TemporaryDirectory() as directory:
        try:
            for answer in serve(task, Path(directory)):
                answers.write(msgspec.json.encode(answer) + b"\n")
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            answers.write(msgspec.json.encode({"failed": text}) + b"\n")
            raise


if __name__ == "__main__":
    main()
