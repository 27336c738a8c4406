"""Test that runs which are interrupted several times in an epoch end bitwise alike, and read no sample twice.
`scripts/torture resumes` does the same at many random points."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from eventloop import Trainer
from eventloop.data.index_reader import IndexReader
from eventloop.data.loader_state import random_state
from eventloop.data.readers import reader_of
from eventloop.data.worker_random_state import InWorker, pack
from tests.support.interrupted import (
    AFTER,
    BATCH,
    ITERS,
    SAMPLES,
    Augmented,
    Case,
    Result,
    assert_same,
    build,
    difference,
    interrupted,
    seed,
    state_of,
    stopped,
    uninterrupted,
)
from tests.support.trainers import MakeTrainer, samples

CASES = [
    (Case("global"), [3, 7, 8]),
    (Case("generator"), [13, 30]),
    (Case("sampler", cumulative_iters=4), [18, 19, 29]),
    (Case("set_epoch", by_epoch=False), [5, 17, 18]),
    (Case("global", 2), [3, 8, 13]),
    (Case("generator", 2, cumulative_iters=4), [21]),
    (Case("sampler", 2), [14, 17]),
    (Case("global", 2, persistent=True), [5, 16, 21]),
    (Case("set_epoch", 2, persistent=True, by_epoch=False), [13]),
]


@cache
def whole_run(case: Case, directory: Path) -> Result:
    """Return the result of the uninterrupted run, which is trained once for all tests."""
    return uninterrupted(case, directory / str(case))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the uninterrupted runs."""
    return tmp_path_factory.mktemp("whole")


@pytest.mark.representative(2)
@pytest.mark.filterwarnings("ignore:cumulative_iters")
@pytest.mark.parametrize(("case", "stops"), CASES, ids=[f"{c.order}-{c.workers}-{s}" for c, s in CASES])
def test_interrupted_run_equals_the_uninterrupted_one(
    directory: Path, tmp_path: Path, case: Case, stops: list[int]
) -> None:
    """Every loss and the final state equal those of the uninterrupted run; without workers each sample is
    read once an epoch."""
    whole = whole_run(case, directory)

    parts = interrupted(case, tmp_path, stops)

    assert difference(whole, parts) is None
    assert len(parts.losses) == ITERS
    assert max(stops) <= ITERS - AFTER
    assert case.workers or torch.equal(parts.reads, whole.reads)


def test_the_comparison_notices_what_differs(directory: Path) -> None:
    """The comparison names the first loss that differs, or the place in the state."""
    whole, other = (whole_run(Case(order), directory) for order in ("global", "generator"))
    moved = {**whole.state, "rng": other.state["rng"]}

    assert str(difference(whole, other)).startswith("loss of iteration 0: ")
    assert str(difference(whole, Result(whole.losses, moved, whole.reads))).startswith("state: state['rng']")


# --- what is read ------------------------------------------------------------------------------------------


def in_one_pass(make_trainer: MakeTrainer, directory: Path, data: Augmented, **options: Any) -> Trainer:
    """Return a trainer of one epoch; all of them train alike."""
    step = {"train_step": lambda trainer, batch: trainer.model(batch[0][:, :2]).sum()}
    seed()
    return make_trainer(
        train_loader=DataLoader(data, BATCH, **options), max_epochs=1, work_dir=directory, **step
    )


class Columns(Augmented):
    """A data set that reads a batch at once, and refuses an empty list of indices."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if not indices:
            raise ValueError("no index")
        return [self[index] for index in indices]


SKIPPED = [0] * 7 * BATCH + [1] * (SAMPLES - 7 * BATCH)
"""How often each sample is read by a run that goes on after seven batches."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("kind", "workers"), [(Augmented, 0), (Augmented, 3), (Columns, 2)])
def test_skipped_samples_are_not_read(
    make_trainer: MakeTrainer, tmp_path: Path, kind: type[Augmented], workers: int
) -> None:
    """A run that resumes in mid-epoch reads each remaining sample once, and no other."""
    whole = in_one_pass(make_trainer, tmp_path / "whole", kind(), num_workers=workers)
    whole.train()
    stopped(in_one_pass(make_trainer, tmp_path, kind(), num_workers=workers), 7)
    data = kind()
    second = in_one_pass(make_trainer, tmp_path, data, num_workers=workers)
    second.resume()

    second.train()

    assert data.reads.tolist() == SKIPPED
    assert_same(state_of(second), state_of(whole))


class Generated(IterableDataset[Any]):
    """An iterable data set, whose samples have no indices."""

    def __iter__(self) -> Iterator[Any]:
        yield from map(samples(20).__getitem__, range(20))


class Sub(DataLoader[Any]):
    """A subclass of DataLoader, which may read in any way."""


class Endless:
    """An iterable that is not a DataLoader, and has no length."""

    def __iter__(self) -> Iterator[Any]:
        yield from DataLoader(samples(20), 4)


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (
            lambda: DataLoader(Generated(), 4),
            "its dataset is an IterableDataset|dataset is an IterableDataset",
        ),
        (lambda: Sub(samples(20), 4), "Sub is a subclass of DataLoader"),
        (Endless, "a Endless is not a torch.utils.data.DataLoader"),
        (lambda: DataLoader(DataLoader(samples(20), 4).dataset, batch_size=None), "batch_size=None"),
    ],
    ids=["iterable", "subclass", "own", "no batches"],
)
def test_other_loaders_are_read_again(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, loader: Any, why: str
) -> None:
    """A loader without lists of indices is read again from the start of the pass, and the log says why."""
    step = {"train_step": lambda trainer, batch: trainer.model(batch[0]).sum()}
    stopped(make_trainer(train_loader=loader(), max_epochs=1, work_dir=tmp_path, **step), 3)
    second = make_trainer(train_loader=loader(), max_epochs=1, work_dir=tmp_path, **step)
    second.resume()

    with caplog.at_level(logging.WARNING, "eventloop"):
        second.train()

    lines = [r.getMessage() for r in caplog.records if "read again and dropped" in r.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("the first 3 batches of the pass, which were trained on")
    assert any(reason in lines[0] for reason in why.split("|"))


# --- workers -----------------------------------------------------------------------------------------------


def batches_of(loader: Any, passes: int) -> list[list[Any]]:
    """Return the batches that a plain loop gets in some passes."""
    return [[value.tolist() for batch in loader for value in batch] for _ in range(passes)]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_reading_through_workers_is_invisible(persistent: bool) -> None:
    """Three passes through a reader equal those of a plain loop, draw as many random numbers, and leave the
    loader unchanged."""
    options: dict[str, Any] = {"shuffle": True, "num_workers": 2, "persistent_workers": persistent}
    seed()
    plain = batches_of(DataLoader(Augmented(), BATCH, **options), 3)
    after = torch.get_rng_state()
    seed()
    loader = DataLoader(Augmented(), BATCH, **options)
    before = dict(vars(loader))
    reader = reader_of(loader)

    read = [[v.tolist() for batch in reader.open(loader, 0, {}) for v in batch] for _ in range(3)]

    assert read == plain
    assert torch.equal(torch.get_rng_state(), after)
    assert vars(loader) == before


def draw_in_worker(worker: int) -> None:
    """Draw in a worker process, as a `worker_init_fn`."""
    torch.manual_seed(torch.initial_seed() + worker)


class WhoReads(Augmented):
    """A data set that returns the reading worker's id and seed."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return index, info.id, info.seed, float(torch.rand(()))


def test_each_worker_goes_on_with_its_own_batches() -> None:
    """After a resume each worker reads its own batches, with its seed and random state."""
    loader = DataLoader(WhoReads(), 16, shuffle=True, num_workers=2, worker_init_fn=draw_in_worker)
    seed()
    opened_with = random_state(loader)
    whole = [[v.tolist() for v in batch] for batch in loader]
    seed()
    reader, part = IndexReader(), []
    passing = reader.open(loader, 0, opened_with)
    part.append([v.tolist() for v in next(passing)])
    state = reader.state_dict(loader, 1)
    del passing
    other = IndexReader()
    other.load_state_dict(loader, state)

    part += [[v.tolist() for v in batch] for batch in other.open(loader, 1, opened_with)]

    assert part == whole


def test_workers_get_one_copy_of_both_functions() -> None:
    """A pickled copy of `collate` and `init` still shares one object and its random states."""
    state = pack()
    inside = InWorker(torch.stack, draw_in_worker, {1: state}, 2)
    collate, init = pickle.loads(pickle.dumps((inside.collate, inside.init)))

    init(1)

    assert pack() == state
    assert collate([]) == (None, 1, (None, None, None))
    assert collate([torch.ones(1)])[1:] == (1, (None, None, None))
    torch.rand(())
    assert collate([torch.ones(1)])[2] == (None, None, pack()[2])


@pytest.mark.parametrize(
    ("was", "now", "warned"),
    [
        ({"num_workers": 2}, {}, "num_workers was 2 in the checkpoint and is 0 in this loader"),
        (
            *[{"num_workers": 1, "in_order": False}] * 2,
            "in_order=False: the batches that were trained on are not",
        ),
    ],
    ids=["another number", "out of order"],
)
def test_workers_whose_states_are_of_no_use(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    was: Any,
    now: Any,
    warned: str,
) -> None:
    """With another number of workers, or batches in any order, the log says why random numbers differ."""
    stopped(in_one_pass(make_trainer, tmp_path, Augmented(), **was), 7)
    data = Augmented()
    second = in_one_pass(make_trainer, tmp_path, data, **now)
    second.resume()

    with caplog.at_level(logging.WARNING, "eventloop"):
        second.train()

    assert warned in caplog.text
    assert data.reads.tolist() == SKIPPED


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case("global"), Case("global", 2), Case("global", 2, persistent=True)], ids=str
)
def test_training_goes_on_without_a_file(tmp_path: Path, directory: Path, case: Case) -> None:
    """`train()` after a stop continues with the workers' states, whatever they have read ahead."""
    whole = whole_run(case, directory)
    seed()
    trainer, losses = build(case, tmp_path)

    stopped(trainer, 16).train()

    state = state_of(trainer)
    trainer.close()
    assert difference(whole, Result(losses, state, whole.reads)) is None


# --- loaders with a state of their own ---------------------------------------------------------------------


class Stateful:
    """A loader that saves its position, and records what it reads."""

    def __init__(self, extra: Any = None) -> None:
        self.reads: list[int] = []
        self._next, self._extra = 0, extra

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        while self._next < 5:
            self._next += 1
            self.reads.append(self._next - 1)
            yield samples(20)[4 * (self._next - 1) : 4 * self._next]
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "extra": self._extra}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


@pytest.mark.parametrize("resumes", [True, False])
def test_loader_with_a_state_goes_on_by_itself(
    make_trainer: MakeTrainer, tmp_path: Path, resumes: bool
) -> None:
    """A loader with a state resumes by itself, and no batch is skipped for it."""
    loader = Stateful()
    trainer = stopped(make_trainer(train_loader=loader, work_dir=tmp_path), 3)
    if resumes:
        loader = Stateful()
        trainer = make_trainer(train_loader=loader, work_dir=tmp_path)
        trainer.resume()

    trainer.train()

    assert loader.reads[0 if resumes else 3 :] == [3, 4, 0, 1, 2, 3, 4]
    assert trainer.iter == 10


def test_loader_whose_state_could_not_be_loaded(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A loader's state that `weights_only=True` would refuse is refused when it is saved, with its place."""
    trainer = make_trainer(train_loader=Stateful(extra=object()), work_dir=tmp_path)

    with pytest.raises(
        TypeError, match=r"train loader \(Stateful.state_dict\(\)\)\['extra'\] is <object.*a state_dict"
    ):
        trainer.train()
