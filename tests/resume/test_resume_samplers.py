"""Test what else decides the order of samples: it is restored, or the log says that it is not."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    get_worker_info,
)

from eventloop.data.loader_state import own_random_state
from eventloop.hooks import CheckpointHook
from tests.support.interrupted import seed, stop_after
from tests.support.trainers import MakeTrainer

COUNT, BATCH, EPOCHS = 22, 4, 4
PER_EPOCH = -(-COUNT // BATCH)
STOPS = [3, PER_EPOCH, PER_EPOCH + 2, 2 * PER_EPOCH + 1]
"""Within the first pass, at its end, and within later ones."""


class Numbered(Dataset[Any]):
    """A data set that returns its indices, and noise from Python's generator."""

    def __init__(self, noise: bool = True) -> None:
        self._noise = noise

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return index, torch.ones(2) + (random.random() if self._noise else 0)


class Ordered(Sampler[int]):
    """A sampler with as many indices as the data set."""

    def __len__(self) -> int:
        return COUNT


class OwnGenerator(Ordered):
    """A sampler that draws each pass from its own generator."""

    def __init__(self, generator: Any) -> None:
        self.own = generator

    def __iter__(self) -> Iterator[int]:
        indices = list(range(COUNT))
        if isinstance(self.own, torch.Generator):
            indices = torch.randperm(COUNT, generator=self.own).tolist()
        else:
            self.own.shuffle(indices)
        return iter(indices)


class Saving(Ordered):
    """A sampler with another order in each pass; its state is the number of passes."""

    def __init__(self) -> None:
        self._passes = 0

    def __iter__(self) -> Iterator[int]:
        self._passes += 1
        return iter(random.Random(self._passes).sample(range(COUNT), COUNT))

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self._passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._passes = state["passes"]


class Placed(Ordered):
    """A sampler whose state is a position within a pass, as in torchdata; the epoch decides the order."""

    def __init__(self) -> None:
        self.epoch = self._yielded = 0
        self._next: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self._yielded, self._next = self._next or 0, None
        for index in random.Random(self.epoch).sample(range(COUNT), COUNT)[self._yielded :]:
            self._yielded += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self._yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["yielded"]


class AtOnce(Sampler[list[int]]):
    """A batch sampler that draws its order when it is asked for an iterator, before a DataLoader draws a seed."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([part.tolist() for part in torch.randperm(COUNT).split(BATCH)])


class Pool(Ordered):
    """A sampler that draws from torch's global generator during the pass."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(COUNT))
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


class Stream(IterableDataset[Any]):
    """An iterable data set that gives each worker a part, with noise from all generators."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        own = 0 if worker is None else worker.seed
        for index in range(start, COUNT, step):
            noise = random.random() + float(np.random.rand()) + torch.rand(2)
            yield index + own % 1000, torch.ones(2) + noise


class Passing(IterableDataset[Any]):
    """A stream with another order in each pass; its state is its position in all passes."""

    def __init__(self) -> None:
        self._read = 0

    def __iter__(self) -> Iterator[Any]:
        passes, place = divmod(self._read, COUNT)
        for index in random.Random(passes).sample(range(COUNT), COUNT)[place:]:
            self._read += 1
            yield index, torch.ones(2)

    def state_dict(self) -> dict[str, Any]:
        return {"read": self._read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._read = state["read"]


class Buffered(IterableDataset[Any]):
    """An iterable data set that is shuffled by a buffer, from Python's generator."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[int] = []
        for index in range(COUNT):
            buffer.append(index)
            if len(buffer) == 8:
                yield buffer.pop(random.randrange(8)), torch.ones(2)
        while buffer:
            yield buffer.pop(random.randrange(len(buffer))), torch.ones(2)


class Sub(DataLoader[Any]):
    """A subclass of DataLoader, which may read in any way."""


def run(
    make_trainer: MakeTrainer,
    loader: Any,
    directory: Path,
    stop: int | None,
    seen: list[Any],
    limit: int | None = None,
) -> None:
    """Train one part of a run, resumed if there is a checkpoint."""
    trainer = make_trainer(
        train_loader=loader,
        train_step=lambda trainer, batch: trainer.model(batch[1]).sum(),
        work_dir=directory,
        hooks=[CheckpointHook(interval=-1)],
        max_epochs=EPOCHS,
        limit_batches=limit,
    )
    if any(directory.glob("*_*")):
        trainer.resume()
    trainer.bus.subscribe(lambda trainer, event: seen.append(values(trainer.batch)), "before_train_iter")
    if stop is not None:
        stop_after(trainer, stop)
    trainer.train()
    trainer.close()


def values(batch: Any) -> list[Any]:
    """Return a batch as lists, to be compared."""
    return [torch.as_tensor(part).tolist() for part in batch]


def whole_and_parts(
    make_trainer: MakeTrainer,
    directory: Path,
    loader: Callable[[], Any],
    stops: list[int],
    limit: int | None = None,
) -> tuple[list[Any], list[Any]]:
    """Return the batches of an uninterrupted run, and those of an interrupted one with other seeds."""
    whole: list[Any] = []
    parts: list[Any] = []
    seed()
    run(make_trainer, loader(), directory / "whole", None, whole, limit)
    for number, stop in enumerate([*stops, None]):
        seed(7 if not number else 99 + number)
        run(make_trainer, loader(), directory / "parts", stop, parts, limit)
    return whole, parts


OWN: list[Callable[[], Any]] = [
    lambda: np.random.Generator(np.random.SFC64(3)),
    lambda: random.Random(3),
    lambda: torch.Generator().manual_seed(3),
    lambda: np.random.Generator(np.random.MT19937(3)),
    lambda: np.random.RandomState(3),
]


def _with_own(make: Callable[[], Any]) -> DataLoader[Any]:
    return DataLoader(Numbered(), BATCH, sampler=OwnGenerator(make()))


LOADERS: dict[str, Callable[[], Any]] = {
    "a stream that draws alone": lambda: DataLoader(Buffered(), BATCH),
    "a stream with a position": lambda: DataLoader(Passing(), BATCH),
    "a subclass": lambda: Sub(Numbered(), BATCH, shuffle=True),
    "a state": lambda: DataLoader(Numbered(), BATCH, sampler=Saving()),
    "batches at once": lambda: DataLoader(Numbered(), batch_sampler=AtOnce()),
    "a place": lambda: DataLoader(Numbered(), BATCH, sampler=Placed()),
    **{f"generator {number}": partial(_with_own, make) for number, make in enumerate(OWN)},
    "workers": lambda: DataLoader(Numbered(), BATCH, sampler=OwnGenerator(OWN[0]()), num_workers=2),
    "workers, a state": lambda: DataLoader(Numbered(), BATCH, sampler=Saving(), num_workers=2),
    "workers, a place": lambda: DataLoader(Numbered(), BATCH, sampler=Placed(), num_workers=2),
    "workers that persist": lambda: DataLoader(
        Numbered(),
        num_workers=2,
        persistent_workers=True,
        batch_sampler=BatchSampler(OwnGenerator(OWN[0]()), BATCH, drop_last=False),
    ),
    "workers of a stream": lambda: DataLoader(Stream(), BATCH, num_workers=2),
}


@pytest.mark.representative(5)
@pytest.mark.parametrize("loader", LOADERS)
def test_the_order_goes_on(make_trainer: MakeTrainer, tmp_path: Path, loader: str) -> None:
    """Resumed runs get the batches of the uninterrupted run with each of these loaders."""
    whole, parts = whole_and_parts(make_trainer, tmp_path, LOADERS[loader], STOPS)

    assert parts == whole


def test_a_generator_without_a_saved_state_is_logged(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A resume names generators whose state the checkpoint lacks."""
    for kind in (random.Random(3), np.random.default_rng(3)):
        run(make_trainer, DataLoader(Numbered(), BATCH, sampler=OwnGenerator(kind)), tmp_path, 3, [])

    (line,) = [line for line in caplog.messages if "the checkpoint has no state of" in line]
    assert "no state of sampler.own: resume with the loader of that run" in line


def test_generator_without_a_state_is_left_alone() -> None:
    """`random.SystemRandom` has no state, and is not saved."""
    loader = DataLoader(Numbered(), sampler=OwnGenerator(random.SystemRandom()))

    assert own_random_state(loader)["generators"] == {}


@pytest.mark.representative(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_draws_during_the_pass_is_logged(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    """A warning names the global generator that a sampler draws from between batches."""

    def loader() -> Any:
        return DataLoader(Numbered(), BATCH, sampler=Pool(), num_workers=workers)

    with caplog.at_level(logging.WARNING, "eventloop"):
        whole_and_parts(make_trainer, tmp_path, loader, [PER_EPOCH + 4])

    (line,) = [line for line in caplog.messages if "the order of the samples may not be" in line]
    assert "the sampler draws from the global generator of torch during the pass; let it draw when" in line


# --- streams ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_persistent_workers_of_a_stream_are_logged(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says that random states of a stream's persistent workers are not saved, and what helps."""
    loaders: list[Any] = []

    def loader() -> Any:
        loaders.append(DataLoader(Stream(), BATCH, num_workers=2, persistent_workers=True))
        return loaders[-1]

    with caplog.at_level(logging.WARNING, "eventloop"):
        whole, parts = whole_and_parts(make_trainer, tmp_path, loader, [PER_EPOCH + 3])
    for each in loaders:  # ends the workers, for each of which the garbage collector would wait 5 s
        each._iterator = None

    assert [batch[0] for batch in parts[: PER_EPOCH + 3]] == [batch[0] for batch in whole[: PER_EPOCH + 3]]
    (line,) = [line for line in caplog.messages if "persistent workers" in line]
    assert "is an IterableDataset, whose samples have no indices: use persistent_workers=False" in line
