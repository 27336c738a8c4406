"""One of the two ranks of test_absent_rank.py, of which one comes late, or leaves its loop.

Arguments: the rank, a rendezvous file. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from eventloop import Trainer
from eventloop.stops import rank_stop

RANK = int(sys.argv[1]) if __name__ == "__main__" else 0
SAID: dict[str, Any] = {}
LOADER = [(torch.ones(2, 2), torch.tensor([0, 1]))] * 4
SECONDS = 60.0
"""Seconds against hangs."""


def make(name: str) -> Trainer:
    """Return a trainer with the default hooks, whose checkpoint hook decides together with the other rank."""
    model = nn.Linear(2, 2)
    return Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        max_epochs=2,
        train_loader=LOADER,
        work_dir=Path("runs") / name,
    )


def comes(path: str) -> bool:
    """Wait for a file of the other rank, and return whether it came."""
    until = monotonic() + SECONDS
    while not (found := Path(path).exists()) and monotonic() < until:
        sleep(0.001)
    return found


@contextmanager
def logged_lines() -> Iterator[list[str]]:
    """Collect the lines that are logged; each is a sign for the other rank, too."""
    lines: list[str] = []

    def record_line(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        Path("logged_lines").touch()

    handler = logging.Handler(logging.WARNING)
    handler.emit = record_line  # type: ignore[method-assign]
    logging.getLogger("eventloop").addHandler(handler)
    yield lines
    logging.getLogger("eventloop").removeHandler(handler)


def late() -> None:
    """Rank 0 begins its run once rank 1 has said that it waits."""
    trainer = make("late")
    if RANK == 0:
        SAID["late"] = comes("logged_lines")
        trainer.train()
        return
    rank_stop.WAIT_SECONDS = 0.0
    with logged_lines() as lines:
        trainer.train()
    SAID["late"] = lines


def left_by(rank: int) -> None:
    """One rank leaves its loop, while the other one is in its own until that run has ended."""
    trainer = make(f"left by {rank}")
    for _ in trainer.epochs():
        if rank != RANK:
            SAID[f"left by {rank}"] = comes(f"left {rank}")
        break
    Path(f"left {RANK}").touch()
    dist.barrier()
    Path(f"left {RANK}").unlink()
    dist.barrier()


def goes_on() -> None:
    """Rank 1 leaves its loop, and its program ends; rank 0 goes on to train."""
    trainer = make("goes on")
    for _ in trainer.epochs():
        if RANK == 1:
            break
        try:
            for inputs, target in trainer.batches(LOADER):
                trainer.outputs = {"loss": F.cross_entropy(trainer.model(inputs), target)}
        except RuntimeError as error:
            SAID["goes on"] = str(error)
        break


def main() -> None:
    """All of them, in one process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2)
    late()
    left_by(0)
    left_by(1)
    goes_on()
    sys.stdout.write(json.dumps(SAID))
    sys.stdout.flush()
    os._exit(0)  # not waited for: the other one finds its connection closed


if __name__ == "__main__":
    main()
