"""One rank of test_resume_other_ranks.py: trains a part of a run, and prints the samples of each of its steps.

Its arguments are the rank, the rendezvous file, and the options of the part as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from tests.support.interrupted import stop_after

COUNT = 64


def numbers_of_rank() -> range:
    """Return the numbers of this rank: each n-th of n ranks."""
    return range(dist.get_rank(), COUNT, dist.get_world_size())


class Numbers(Dataset[int]):
    """Each sample is its number."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """A rank's part of the numbers."""

    def __iter__(self) -> Iterator[int]:
        yield from numbers_of_rank()


class KeepsPlace(DistributedSampler[int]):
    """A sampler that saves its place in the pass, as torchdata's does."""

    given = start = 0

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        for self.given, index in enumerate([*super().__iter__()][start:], start + 1):
            yield index

    def state_dict(self) -> dict[str, int]:
        """Return the number of indices that were given out."""
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next pass at that place."""
        self.start = state["given"]


class EveryNth(Sampler[int]):
    """A sampler of somebody's own, which gives a rank each n-th number."""

    def __len__(self) -> int:
        return len(numbers_of_rank())

    def __iter__(self) -> Iterator[int]:
        return iter(numbers_of_rank())


class OwnState:
    """A loader that saves its own position."""

    def __init__(self, batch: int) -> None:
        self.batch, self.done, self.start = batch, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        batches = torch.tensor(numbers_of_rank()).split(self.batch)
        start, self.start = self.start, 0
        for self.done in range(start + 1, len(batches) + 1):
            yield batches[self.done - 1]

    def state_dict(self) -> dict[str, int]:
        """Return the number of batches that were given out."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after these batches."""
        self.start = state["done"]


def loader_of(kind: str, batch: int) -> Any:
    """Return the loader of a rank."""
    if kind == "stream":
        return DataLoader(Stream(), batch)
    if kind == "own state":
        return OwnState(batch)
    data = Numbers()
    sampler: Any = EveryNth() if kind == "own sampler" else DistributedSampler(data, seed=3)
    if kind == "saved sampler":
        sampler = KeepsPlace(data, seed=3)
    if kind == "drop_last":
        sampler = DistributedSampler(data, seed=3, drop_last=True)
    return DataLoader(data, batch, sampler=sampler, num_workers=2 * (kind == "workers"))


def main() -> None:
    """Train the part."""
    options = json.loads(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=options["ranks"]
    )
    steps: list[list[int]] = []
    lines: list[str] = []
    keep = logging.Handler()
    keep.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("eventloop").addHandler(keep)

    model = DistributedDataParallel(nn.Linear(1, 1))

    def step(trainer: Trainer, batch: torch.Tensor) -> dict[str, Any]:
        steps.append(batch.tolist())
        return {"loss": model(batch.float().view(-1, 1)).mean() * 1e-6}

    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_step=step,
        max_epochs=2,
        train_loader=loader_of(options["kind"], options["batch"]),
        hooks=[CheckpointHook()],
        work_dir="run",
    )
    error = None
    try:
        if "path" in options:
            trainer.resume(options["path"], changed=options["changed"])
        if "stop" in options:
            stop_after(trainer, options["stop"])
        trainer.train()
    except Exception as raised:  # the test reads its text
        error = f"{type(raised).__name__}: {raised}"
    trainer.close()
    sys.stdout.write(json.dumps({"steps": steps, "lines": lines, "error": error}))


if __name__ == "__main__":
    main()
