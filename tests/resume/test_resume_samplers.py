"""What decides the order of the samples beside torch's own samplers: it is put back, or the log says that it is not."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
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
    RandomSampler,
    Sampler,
    get_worker_info,
)

from eventloop import Trainer
from eventloop.data.rng import samplers_state, set_samplers, unrestorable_in
from eventloop.hooks import CheckpointHook
from tests.support.interrupted import seed, stop_after
from tests.support.trainers import MakeTrainer, tiny_model

COUNT, BATCH, EPOCHS = 22, 4, 4
PER_EPOCH = -(-COUNT // BATCH)
STOPS = [3, PER_EPOCH, PER_EPOCH + 2, 2 * PER_EPOCH + 1]
"""Within the first pass, at its end, and within later ones."""


class Numbered(Dataset[Any]):
    """Samples that say which they are, with noise from Python's generator."""

    def __init__(self, noise: bool = True) -> None:
        self._noise = noise

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return index, torch.ones(2) + (random.random() if self._noise else 0)


class Ordered(Sampler[int]):
    """As many as the data set has."""

    def __len__(self) -> int:
        return COUNT


class OwnGenerator(Ordered):
    """Draws each pass from a generator of its own, which moves on from pass to pass."""

    def __init__(self, generator: Any) -> None:
        self.own = generator

    def __iter__(self) -> Iterator[int]:
        indices = list(range(COUNT))
        if isinstance(self.own, torch.Generator):
            indices = torch.randperm(COUNT, generator=self.own).tolist()
        else:
            self.own.shuffle(indices)
        return iter(indices)


class Passes:
    """Each pass has an order of its own, and how many there were is the state."""

    def __init__(self) -> None:
        self._passes = 0

    def __iter__(self) -> Iterator[int]:
        self._passes += 1
        return iter(random.Random(self._passes).sample(range(COUNT), COUNT))

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self._passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._passes = state["passes"]


class Saving(Passes, Ordered):
    """Keeps what it draws from where nobody finds it, and has a state."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden = [random.Random(0)]


class Placed(Ordered):
    """Its state is a place within a pass, as that of torchdata's samplers; the order is the epoch's."""

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


class Counted(Ordered):
    """Draws by a number that it counts itself, and has no state."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(random.Random(self.passes).sample(range(COUNT), COUNT))


class Pool(Ordered):
    """Draws as it goes, without replacement, from a global generator."""

    def __init__(self, draw: Callable[[int], int] = random.randrange) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[int]:
        left = list(range(COUNT))
        while left:
            yield left.pop(self._draw(len(left)))


def of_torch(stop: int) -> int:
    """A number below, from torch's global generator, as dropout draws from it."""
    return int(torch.randint(stop, ()))


class Stream(IterableDataset[Any]):
    """Each worker's part, with noise from all of the generators it has."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        own = 0 if worker is None else worker.seed
        for index in range(start, COUNT, step):
            noise = random.random() + float(np.random.rand()) + torch.rand(2)
            yield index + own % 1000, torch.ones(2) + noise


def step(trainer: Trainer, batch: Any) -> Any:
    """A loss; the model's dropout draws from torch's generator."""
    return trainer.model(batch[1]).sum()


def run(make_trainer: MakeTrainer, loader: Any, directory: Path, stop: int | None, seen: list[Any]) -> None:
    """One part of a run, which goes on from a checkpoint where there is one."""
    model = tiny_model()
    options: dict[str, Any] = {"hooks": [CheckpointHook(interval=-1)], "max_epochs": EPOCHS}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(
        model=model, optimizer=optimizer, train_loader=loader, train_step=step, work_dir=directory, **options
    )
    if any((directory / "checkpoints").glob("*")) or any(directory.glob("*_*")):
        trainer.resume()
    trainer.bus.subscribe(lambda trainer, event: seen.append(values(trainer.batch)), "before_train_iter")
    if stop is not None:
        stop_after(trainer, stop)
    trainer.train()
    trainer.close()


def values(batch: Any) -> list[Any]:
    """What a batch is, to be compared."""
    return [torch.as_tensor(part).tolist() for part in batch]


def whole_and_parts(
    make_trainer: MakeTrainer, directory: Path, loader: Callable[[], Any], stops: list[int]
) -> tuple[list[Any], list[Any]]:
    """The batches of a run that is not interrupted, and of one that is, in another process as far as it knows."""
    whole: list[Any] = []
    parts: list[Any] = []
    seed()
    run(make_trainer, loader(), directory / "whole", None, whole)
    for number, stop in enumerate([*stops, None]):
        seed(7 if not number else 99 + number)
        run(make_trainer, loader(), directory / "parts", stop, parts)
    return whole, parts


OWN: dict[str, Callable[[], Any]] = {
    "pcg64": lambda: np.random.default_rng(3),
    "mt19937": lambda: np.random.Generator(np.random.MT19937(3)),
    "philox": lambda: np.random.Generator(np.random.Philox(3)),
    "sfc64": lambda: np.random.Generator(np.random.SFC64(3)),
    "RandomState": lambda: np.random.RandomState(3),
    "Random": lambda: random.Random(3),
    "torch": lambda: torch.Generator().manual_seed(3),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OWN)
def test_generator_of_a_sampler_goes_on(make_trainer: MakeTrainer, tmp_path: Path, kind: str) -> None:
    """A sampler that draws from a generator of its own, whatever it calls it, draws what it would have drawn."""

    def loader() -> Any:
        return DataLoader(Numbered(), BATCH, sampler=OwnGenerator(OWN[kind]()))

    whole, parts = whole_and_parts(make_trainer, tmp_path, loader, STOPS[1:])

    assert parts == whole
    assert len({str(whole[i : i + PER_EPOCH]) for i in range(0, len(whole), PER_EPOCH)}) == EPOCHS


@pytest.mark.slow
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("persistent", [False, True])
def test_generator_of_a_sampler_goes_on_with_workers(
    make_trainer: MakeTrainer, tmp_path: Path, stop: int, persistent: bool
) -> None:
    """So it does where workers have read ahead."""

    def loader() -> Any:
        sampler = BatchSampler(OwnGenerator(np.random.default_rng(3)), BATCH, drop_last=False)
        return DataLoader(Numbered(), batch_sampler=sampler, num_workers=2, persistent_workers=persistent)

    whole, parts = whole_and_parts(make_trainer, tmp_path, loader, [stop])

    assert parts == whole


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sampler", [Saving, Placed])
def test_sampler_with_a_state_goes_on(
    make_trainer: MakeTrainer, tmp_path: Path, sampler: Callable[[], Any], workers: int
) -> None:
    """One with `state_dict` is given its state of when the pass was opened, also where that is a place at the end of
    the pass before."""

    def loader() -> Any:
        return DataLoader(Numbered(), BATCH, sampler=sampler(), num_workers=workers)

    whole, parts = whole_and_parts(make_trainer, tmp_path, loader, STOPS)

    assert parts == whole


def test_sampler_whose_state_could_not_be_loaded(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """It is refused when it is saved, by its place."""

    class Strange(Saving):
        def state_dict(self) -> dict[str, Any]:
            return {"passes": np.arange(2)}

    loader = DataLoader(Numbered(), BATCH, sampler=Strange())

    with pytest.raises(
        TypeError, match=r"\['states'\]\['Strange\(0\)'\]\['passes'\] is array.*a state_dict must consist"
    ):
        run(make_trainer, loader, tmp_path, None, [])


def test_sampler_that_cannot_be_known_is_told(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that counts its passes itself is another after a resume in a later pass, and one line of the log says so."""

    def loader() -> Any:
        return DataLoader(Numbered(), BATCH, sampler=Counted())

    with caplog.at_level(logging.WARNING, "eventloop"):
        whole, parts = whole_and_parts(make_trainer, tmp_path, loader, [PER_EPOCH + 2])

    assert parts != whole
    lines = [
        line
        for line in caplog.messages
        if "the order of the samples may not be that of the interrupted run" in line
    ]
    assert len(lines) == 1
    assert "cannot restore Counted(0).passes: " in lines[0]


def test_checkpoint_from_before_samplers_were_saved(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is resumed from as it was then, and the log says what it lacks."""
    first = make_trainer(
        train_loader=DataLoader(Numbered(), BATCH, sampler=OwnGenerator(random.Random(3))), train_step=step,
        work_dir=tmp_path,
    )  # fmt: skip
    stop_after(first, 3)
    first.train()
    state = first.position.state_dict()
    del state["samplers"], state["opened_with"]["samplers"]
    second = make_trainer(
        train_loader=DataLoader(Numbered(), BATCH, sampler=OwnGenerator(random.Random(3))), train_step=step,
        work_dir=tmp_path / "second", max_epochs=1,
    )  # fmt: skip
    second.position.load_state_dict(state)

    with caplog.at_level(logging.WARNING, "eventloop"):
        second.train()

    assert second.iter == PER_EPOCH - 3
    assert "cannot restore OwnGenerator(0).own: " in caplog.text


def test_generator_of_another_kind_keeps_its_state(caplog: pytest.LogCaptureFixture) -> None:
    """A sampler that draws from something else than it did is not given what it cannot take."""
    saved = samplers_state(DataLoader(Numbered(), sampler=OwnGenerator(np.random.default_rng(3))))
    loader = DataLoader(Numbered(), sampler=OwnGenerator(random.Random(5)))
    before = samplers_state(loader)

    set_samplers(loader, saved, opening=True)

    assert str(samplers_state(loader)) == str(before)
    assert unrestorable_in(loader, saved) == ["OwnGenerator(0).own"]


def test_generator_without_a_state_is_left_alone() -> None:
    """The system's source of randomness has none to save."""
    loader = DataLoader(Numbered(), sampler=OwnGenerator(random.SystemRandom()))

    assert samplers_state(loader)["generators"] == {}


class SavesItself(DataLoader[Any]):
    """Finds its place by drawing again, as torchdata's StatefulDataLoader does."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "told"),
    [
        (lambda: OwnGenerator(random.Random(3)), [r"OwnGenerator(0).own"]),
        (lambda: RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(3)), ["RandomSampler"]),
        (lambda: RandomSampler(range(COUNT)), []),
    ],
    ids=["own", "torch", "none"],
)
def test_generator_that_a_loader_with_a_state_forgets_is_told(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, sampler: Any, told: list[str]
) -> None:
    """A loader that saves its own state draws from the sampler as it stands, and one line says what that leaves out."""
    with caplog.at_level(logging.WARNING, "eventloop"):
        whole_and_parts(
            make_trainer, tmp_path, lambda: SavesItself(Numbered(), BATCH, sampler=sampler()), [3]
        )

    lines = [line for line in caplog.messages if "the state of the SavesItself does not contain" in line]
    assert [f"the generator of {name}; use shuffle=True" in line for line, name in zip(lines, told, strict=True)] \
        == [True] * len(told)  # fmt: skip


# --- samplers that draw as the pass goes --------------------------------------------------------------------


def warnings_of_order(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of an order that cannot be had by drawing the indices alone."""
    return [line for line in caplog.messages if "during the pass" in line]


@pytest.mark.representative(2)
@pytest.mark.parametrize("stop", STOPS)
def test_samples_are_read_again_where_they_share_the_samplers_generator(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, stop: int
) -> None:
    """Where reading draws from the generator that the sampler draws from between batches, only reading finds the order
    again: it is done, told, and exact."""
    with caplog.at_level(logging.WARNING, "eventloop"):
        whole, parts = whole_and_parts(
            make_trainer, tmp_path, lambda: DataLoader(Numbered(), BATCH, sampler=Pool()), [stop]
        )

    assert parts == whole
    again = (
        "read again and dropped: the sampler draws from the global generator of python during the pass, and"
    )
    assert [again in line for line in warnings_of_order(caplog)] == ([True] if stop in (3, 8) else [])


def test_nothing_is_read_again_for_a_sampler_that_draws_alone(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where nobody else draws from its generator, drawing the indices finds the order, and nothing is told."""
    with caplog.at_level(logging.WARNING, "eventloop"):
        whole, parts = whole_and_parts(
            make_trainer, tmp_path, lambda: DataLoader(Numbered(noise=False), BATCH, sampler=Pool()), STOPS
        )

    assert parts == whole
    assert warnings_of_order(caplog) == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_order_that_training_has_a_part_in_is_told(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    """A sampler that draws between the masks of a dropout cannot be followed, and the log says so."""
    with caplog.at_level(logging.WARNING, "eventloop"):
        whole_and_parts(
            make_trainer, tmp_path, lambda: DataLoader(Numbered(), BATCH, sampler=Pool(of_torch), num_workers=workers),
            [PER_EPOCH + 4],
        )  # fmt: skip

    told = [
        line for line in warnings_of_order(caplog) if line.startswith("the order of the samples is not that")
    ]
    assert len(told) == 1
    assert "draws from the global generator of torch during the pass, and so does the training" in told[0]


# --- streams whose workers persist --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stops", [[3], [PER_EPOCH], [PER_EPOCH + 3], STOPS], ids=str)
@pytest.mark.parametrize("batch", [BATCH, None])
def test_workers_of_a_stream_go_on(
    make_trainer: MakeTrainer, tmp_path: Path, stops: list[int], batch: int | None
) -> None:
    """Workers that persist over an IterableDataset go on in any pass, with their seeds and their random states."""

    def loader() -> Any:
        return DataLoader(Stream(), batch, num_workers=2, persistent_workers=True)

    whole, parts = whole_and_parts(make_trainer, tmp_path, loader, stops)

    assert parts == whole


@pytest.mark.slow
def test_stream_goes_on_without_a_file(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """`train()` called again after a stop in a later pass goes on with the workers' states."""
    whole: list[Any] = []
    seed()
    loader = DataLoader(Stream(), BATCH, num_workers=2, persistent_workers=True)
    run(make_trainer, loader, tmp_path / "whole", None, whole)
    seed()
    loader = DataLoader(Stream(), BATCH, num_workers=2, persistent_workers=True)
    trainer = make_trainer(
        train_loader=loader, train_step=step, max_epochs=EPOCHS, work_dir=tmp_path / "parts"
    )
    seen: list[Any] = []
    trainer.bus.subscribe(lambda trainer, event: seen.append(values(trainer.batch)), "before_train_iter")
    stop_after(trainer, PER_EPOCH + 3)

    trainer.train()
    trainer.train()

    assert seen == whole


class Sub(DataLoader[Any]):
    """A loader that may do anything."""


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, PER_EPOCH + 3])
def test_workers_that_cannot_go_on_are_told(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, stop: int
) -> None:
    """Workers that persist in a loader that is not rebuilt are exact in the pass that began them, and after that the
    log says why they are not."""
    with caplog.at_level(logging.WARNING, "eventloop"):
        whole, parts = whole_and_parts(
            make_trainer,
            tmp_path,
            lambda: Sub(Stream(), BATCH, num_workers=2, persistent_workers=True),
            [stop],
        )

    lines = [
        line
        for line in caplog.messages
        if line.startswith("the loader's persistent workers were started in an earlier pass")
    ]
    assert (parts == whole) == (stop == 3)
    assert ["random numbers differ from here on" in line for line in lines] == [True] * (stop != 3)
