"""Train with one loader of the catalog, in one piece and in parts, each in a process of its own for each rank.

    python -m tests.loaders.program "DataLoader, shuffled" FOLDER
    python -m tests.loaders.program "StatefulDataLoader, DistributedSampler" FOLDER 2

The parts are: stopped in mid-epoch, killed in mid-epoch, stopped at the end of an epoch, the rest. Each rank writes what
it saw to a file of the part's name and the rank in FOLDER.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import signal
import sys
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from tests.loaders.catalog import PER_EPOCH, ROWS, Row
from tests.loaders.catalog_ranks import RANK_ROWS

EPOCHS = 3
STOPPED_AT, SAVED_AT = 7, PER_EPOCH + 7
"""The iterations of the checkpoints in the middle of the first epoch and of the second."""
DEADLINE = 60.0
"""Seconds against hangs."""


class Part(NamedTuple):
    """A part of a run: the iteration that it is stopped or killed after, and the seed of its process."""

    seed: int
    stop: int | None = None
    killed: bool = False


PARTS = {
    "whole": Part(7),
    "stopped": Part(7, stop=STOPPED_AT),
    "killed": Part(101, killed=True),
    "at the end of an epoch": Part(102, stop=2 * PER_EPOCH),
    "rest": Part(103),
}


def leaves(batch: Any) -> Iterator[Any]:
    """Yield the values of a nested batch."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for item in batch:
            yield from leaves(item)
    else:
        yield batch


def features(batch: Any) -> torch.Tensor:
    """Return the features of the batch's first samples."""
    return next(each for each in leaves(batch) if isinstance(each, torch.Tensor) and each.is_floating_point())


def digest(values: Any) -> str:
    """Return a text that is the same for the same bits only."""
    crc = 0
    for each in leaves(values):
        each = each.numpy().tobytes() if isinstance(each, torch.Tensor) else repr(each).encode()
        crc = zlib.crc32(each, crc)
    return f"{crc:08x}"


def numbers(batch: Any) -> list[int]:
    """Return the numbers of the samples of a batch; [] if it holds no batch of them."""
    return next(([*each.tolist()] for each in leaves(batch) if isinstance(each, torch.Tensor)), [])


def until(path: Path) -> None:
    """Wait for a path: the directory of a checkpoint is renamed when it is durable."""
    ends = time.monotonic() + DEADLINE
    while not path.exists():
        assert time.monotonic() < ends, f"{path} was not saved"
        time.sleep(0.01)


def train(row: Row, part: str, folder: Path, rank: int, ranks: int) -> None:
    """Train one part of a run, as one of its ranks."""
    options, record = PARTS[part], (folder / f"{part}.{rank}.jsonl").open("w", buffering=1)
    logging.basicConfig(filename=folder / f"{part}.{rank}.log", format="%(message)s", force=True)
    logging.getLogger("datasets").propagate = True
    if ranks > 1:
        join_ranks(folder / f"{part}.meeting", rank, ranks)
    seed(options.seed + 1000 * rank)
    loader = row.make(folder)
    seed(options.seed + 1000 * rank)
    model: nn.Module = nn.Sequential(
        nn.Linear(2, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )
    model = DistributedDataParallel(model) if ranks > 1 else model
    trainer = Trainer(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        train_loader=loader,
        max_epochs=EPOCHS,
        train_step=lambda trainer, batch: model(features(batch)).square().mean(),
        hooks=[CheckpointHook(SAVED_AT, by_epoch=False)],
        work_dir=folder / ("whole" if part == "whole" else "parts"),
    )

    @trainer.bus.on("after_train_iter")
    def write_position(trainer: Trainer, event: Any) -> None:
        record.write(json.dumps([event.iter, [digest(trainer.batch), numbers(trainer.batch)]]) + "\n")
        if event.iter + 1 == options.stop:
            trainer.stop("enough")
        if options.killed and event.iter == SAVED_AT + 1:
            until(trainer.work_dir / f"iter_{SAVED_AT}")
            die_together(folder, rank, ranks)

    if options.seed != PARTS["whole"].seed:
        trainer.resume()
    trainer.train()
    if options.stop is None:
        record.write(json.dumps(["weights", digest([*model.state_dict().values()])]) + "\n")
    record.close()
    trainer.close()
    if ranks > 1:
        dist.destroy_process_group()


def seed(number: int) -> None:
    """Seed all generators."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def join_ranks(file: Path, rank: int, ranks: int) -> None:
    """Join the other ranks, with the variables that torchrun sets."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)


def die_together(folder: Path, rank: int, ranks: int) -> None:
    """Kill this rank, once each other one is about to die and needs it no more."""
    (folder / f"dying.{rank}").touch()
    for other in range(ranks):
        until(folder / f"dying.{other}")
    os.kill(os.getpid(), signal.SIGKILL)


def main(name: str, folder: str, count: str = "1") -> None:
    """Train all parts, one after the other, each rank in a fork of this process, which only imports."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ranks, row = int(count), (ROWS if count == "1" else RANK_ROWS)[name]
    for module in ("torch._dynamo", row.package):  # torch imports the first for the first optimizer
        importlib.import_module(module)
    for part, options in PARTS.items():
        running = []
        for rank in range(ranks):
            if not (pid := os.fork()):
                train(row, part, Path(folder), rank, ranks)
                return
            running.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in running]
        if codes != [-signal.SIGKILL if options.killed else 0] * ranks:
            sys.exit(f"the ranks of the part {part!r} ended with {codes}")


if __name__ == "__main__":
    main(*sys.argv[1:])
