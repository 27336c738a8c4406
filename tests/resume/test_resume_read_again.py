"""Test resumes with loaders whose batches are read again: other batches than before are logged."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from eventloop import Trainer
from eventloop.data.plain_reader import PlainReader, batch_print
from eventloop.hooks import CheckpointHook
from tests.resume.test_resume_samplers import BATCH, PER_EPOCH, Numbered, Stream, whole_and_parts
from tests.support.interrupted import stop_after, stopped
from tests.support.trainers import MakeTrainer, batches

BATCHES = batches(5)


class Other:
    """A loader with another order in each object, and as many batches in a pass as it is told."""

    made = itertools.count()

    def __init__(self, count: int = 5) -> None:
        self._first, self._count = next(Other.made), count

    def __iter__(self) -> Iterator[Any]:
        return iter((BATCHES[self._first % 5 :] + BATCHES[: self._first % 5])[: self._count])


class Drawing:
    """A loader whose batches depend on all draws before, from the generator that dropout draws from."""

    def __iter__(self) -> Iterator[Any]:
        drawn = torch.zeros(())
        for inputs, target in BATCHES:
            drawn = drawn + torch.rand(())
            yield inputs + drawn, target


class Same:
    """A loader that gives the same batches in each pass."""

    def __iter__(self) -> Iterator[Any]:
        return ((inputs.clone(), target) for inputs, target in BATCHES)


LINES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "order": (
        Other,
        Other,
        "batch 4 of the pass, read again, .*: the Other gives other batches .* a seed that is the",
    ),
    "numbers": (
        Drawing,
        Drawing,
        "batch 4 .* the Drawing draws from the global generator of torch .* num_workers=1",
    ),
    "length": (
        Other,
        lambda: Other(2),
        "the Other gave 2 batches where 4 of the pass were trained on: the pass ends",
    ),
}


@pytest.mark.representative(1)
@pytest.mark.parametrize(("before", "after", "line"), LINES.values(), ids=LINES)
def test_other_batches_are_logged(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    before: Any,
    after: Any,
    line: str,
) -> None:
    """A resume warns in one line if the last batch that is read again differs from the batch that was trained on."""
    stopped(make_trainer(train_loader=before(), work_dir=tmp_path), 4).close()
    second = make_trainer(train_loader=after(), work_dir=tmp_path)
    second.resume()

    second.train()

    (_, found) = caplog.messages
    assert re.search(line, found)


def step_in_place(trainer: Trainer, batch: Any) -> torch.Tensor:
    """Normalise a batch in place, and return its loss."""
    loss: torch.Tensor = trainer.model(batch[0].div_(2)).sum()
    return loss


@pytest.mark.representative(1)
@pytest.mark.parametrize("resumes", [True, False], ids=["resumed", "goes on"])
@pytest.mark.parametrize(
    "options", [{}, {"loss_fn": None, "train_step": step_in_place}], ids=["", "in place"]
)
def test_the_same_batches_are_not(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, resumes: bool, options: Any
) -> None:
    """Nothing is logged of batches that are the same, also where the training changes its own in place."""
    trainer = stopped(make_trainer(train_loader=Same(), work_dir=tmp_path, **options), 3)
    if resumes:
        trainer = make_trainer(train_loader=Same(), work_dir=tmp_path, **options)
        trainer.resume()

    trainer.train()

    (line,) = caplog.messages
    assert line.startswith(
        "the first 3 batches of the pass, which were trained on, are read again and dropped"
    )


def test_a_batch_that_was_read_and_not_trained_on() -> None:
    """A checkpoint that is taken when the next batch was read already does not take it for the last one."""
    reader, loader = PlainReader("it is no DataLoader"), Same()
    reading = reader.open(loader, 0, {})
    next(reading)
    last = reader.state_dict(loader, 1)
    next(reading)

    assert last["last_batch"] == batch_print(BATCHES[0])
    assert reader.state_dict(loader, 1) == {}


# --- loaders that combine or wrap others --------------------------------------------------------------------


class Zip:
    """A loader of its own that reads two others."""

    def __init__(self, *loaders: Any) -> None:
        self._loaders = loaders

    def __iter__(self) -> Iterator[Any]:
        for (index, inputs), (other, _) in zip(*self._loaders, strict=True):
            yield torch.cat([index, other]), inputs


class Own(IterableDataset[Any]):
    """A stream that draws from a generator of its own, and counts its epochs."""

    def __init__(self) -> None:
        self.generator, self.epoch = torch.Generator().manual_seed(1), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for _ in range(2 * PER_EPOCH * BATCH):
            yield torch.randint(99, (), generator=self.generator) + 100 * self.epoch, torch.ones(2)


def _ranks() -> Zip:
    samplers: list[Any] = [DistributedSampler(Numbered(), 2, rank) for rank in (0, 1)]
    return Zip(*(DataLoader(Numbered(False), 2, sampler=sampler) for sampler in samplers))


COMBINED: dict[str, Callable[[], Any]] = {
    "generators": lambda: Zip(
        *(
            DataLoader(Numbered(False), BATCH, shuffle=True, generator=torch.Generator().manual_seed(seed))
            for seed in (1, 2)
        )
    ),
    "distributed samplers": _ranks,
    "a stream": lambda: Zip(DataLoader(Stream(), BATCH), DataLoader(Stream(), BATCH)),
}


@pytest.mark.representative(1)
@pytest.mark.parametrize("loader", COMBINED)
def test_combined_loaders_go_on(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, loader: str
) -> None:
    """A loader that reads several DataLoaders gets their generators and epochs back."""
    whole, parts = whole_and_parts(make_trainer, tmp_path, COMBINED[loader], [3, PER_EPOCH + 2])

    assert parts == whole
    assert [batch[0] for batch in whole[:PER_EPOCH]] != [
        batch[0] for batch in whole[PER_EPOCH : 2 * PER_EPOCH]
    ] or (loader == "a stream")
    assert not any("differs from" in line for line in caplog.messages)


def test_a_data_set_is_told_its_epoch(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A stream with `set_epoch` gets the number of each epoch; its generator and epoch continue after a resume."""
    whole, parts = whole_and_parts(
        make_trainer, tmp_path, lambda: DataLoader(Own(), 2 * BATCH), [3, PER_EPOCH + 2]
    )

    assert parts == whole
    assert [int(batch[0][0]) // 100 for batch in whole[::PER_EPOCH]] == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_persistent_workers_of_a_part_are_logged(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    """Persistent workers of a DataLoader that another loader reads are named at a resume."""

    def loader() -> Zip:
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": bool(workers)}
        return Zip(DataLoader(Numbered(), BATCH, **options), DataLoader(Numbered(), BATCH))

    for _ in range(2):
        trainer = make_trainer(
            train_loader=loader(),
            work_dir=tmp_path,
            loss_fn=None,
            hooks=[CheckpointHook(interval=-1)],
            train_step=lambda trainer, batch: trainer.model(batch[1]).sum(),
            max_epochs=1,
        )
        if (tmp_path / "iter_3").exists():
            trainer.resume()
        else:
            stop_after(trainer, 3)
        trainer.train()
        for each in trainer.train_loader._loaders:  # type: ignore[union-attr]
            each._iterator = None

    assert any("persistent workers" in line for line in caplog.messages) == bool(workers)
