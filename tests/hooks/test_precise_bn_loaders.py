"""PreciseBN beside a loader that trains: training sees the batches it would have seen without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from eventloop import Trainer
from eventloop.hooks import CheckpointHook, PreciseBN
from tests.resume.test_resume_samplers import Placed, Saving

Make = Callable[..., Trainer]

COUNT, SIZE = 22, 4
PER_EPOCH = -(-COUNT // SIZE)


def rows() -> list[Any]:
    """Samples whose input says which they are."""
    return [(torch.tensor([float(index), 0.0]), torch.zeros(1)) for index in range(COUNT)]


def batches() -> list[Any]:
    """Batches in a list."""
    return list(DataLoader(rows(), SIZE))  # type: ignore[arg-type]


class PlaceInLoader:
    """Its passes share one position."""

    def __init__(self) -> None:
        self._batches, self._next = batches(), 0

    def __len__(self) -> int:
        return PER_EPOCH

    def __iter__(self) -> Iterator[Any]:
        while self._next < PER_EPOCH:
            self._next += 1
            yield self._batches[self._next - 1]
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class Stream(IterableDataset[Any]):
    """Goes on where it is, with a state for a loader that asks."""

    def __iter__(self) -> Iterator[Any]:
        yield from rows()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def loader_of(**options: Any) -> DataLoader[Any]:
    """A loader of the samples."""
    return DataLoader(rows(), **options)  # type: ignore[arg-type]


LOADERS: dict[str, Callable[[], Any]] = {
    "list": batches,
    "shuffled": lambda: loader_of(batch_size=SIZE, shuffle=True),
    "own generator": lambda: loader_of(
        batch_size=SIZE, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "distributed": lambda: loader_of(batch_size=SIZE, sampler=DistributedSampler(range(COUNT), 1, 0)),  # type: ignore[arg-type]
    "workers": lambda: loader_of(batch_size=SIZE, shuffle=True, num_workers=2, persistent_workers=True),
}


def trained(
    make_trainer: Make, loader: Any, *hooks: Any, stop: int | None = None, **options: Any
) -> tuple[Trainer, list[Any]]:
    """A trainer, and where the first samples of the batches it trains on will be noted, with the iteration."""
    model, seen = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)), list[Any]()

    def step(trainer: Trainer, batch: Any) -> Any:
        if torch.is_grad_enabled():
            seen.append((trainer.iter, batch[0][:, 0].tolist()))
        return F.mse_loss(trainer.model(batch[0]), batch[1])

    trainer = make_trainer(model=model, train_loader=loader, train_step=step, hooks=hooks, **options)
    trainer.bus.subscribe(
        lambda event: trainer.stop("enough") if event.iter + 1 == stop else None, "after_train_iter"
    )
    return trainer, seen


UNITS: list[tuple[dict[str, int], int]] = [
    ({"max_epochs": 3}, 1),
    ({"max_iters": 15}, 2),
    ({"max_iters": 15}, 3),
]


@pytest.mark.representative(6)
@pytest.mark.parametrize(("unit", "interval"), UNITS, ids=str)
@pytest.mark.parametrize("num_iter", [2, None])
@pytest.mark.parametrize("loader", LOADERS)
def test_training_sees_the_same_batches(
    make_trainer: Make, loader: str, num_iter: int | None, unit: Any, interval: int
) -> None:
    """Whoever keeps the place or counts the passes, and wherever in a pass it runs, training goes on as without it."""
    ends = []
    for hooks in ([], [PreciseBN(interval=interval, num_iter=num_iter)]):
        torch.manual_seed(3)
        trainer, seen = trained(make_trainer, LOADERS[loader](), *hooks, **unit)
        trainer.train()
        ends.append((seen, torch.rand(1).item()))

    assert ends[0] == ends[1]
    assert len(ends[0][0]) in (15, 3 * PER_EPOCH)


@pytest.mark.slow
@pytest.mark.representative(2)
@pytest.mark.parametrize("stop", [PER_EPOCH, PER_EPOCH + 2])
@pytest.mark.parametrize("loader", LOADERS)
def test_the_checkpoint_has_the_place_of_the_training(
    make_trainer: Make, tmp_path: Path, loader: str, stop: int
) -> None:
    """A checkpoint saved behind the pass, before training goes on, leads to the batches that were to come."""
    whole, seen = trained(make_trainer, LOADERS[loader](), max_epochs=3)
    whole.train()
    after = []
    for part, stop_at in enumerate((stop, None)):
        trainer, of_part = trained(
            make_trainer,
            LOADERS[loader](),
            PreciseBN(interval=1, num_iter=2, by_epoch=False),
            stop=stop_at,
            max_epochs=3,
            work_dir=tmp_path / "parts",
            default_hooks={"checkpoint": CheckpointHook(interval=1, by_epoch=False)},
        )
        if part:
            trainer.resume(tmp_path / "parts" / f"iter_{stop}")
        trainer.train()
        after += of_part

    assert after == seen


@pytest.mark.representative(2)
@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_pass_that_was_missed_leaves_the_place(
    make_trainer: Make, tmp_path: Path, loader: str, resumes: bool
) -> None:
    """The pass that a stop cut short is made before the training goes on, in the same process or after a resume, and
    that goes on at the batch it was at."""
    whole, seen = trained(make_trainer, LOADERS[loader](), max_epochs=3)
    whole.train()
    ran: list[int] = []

    def forward(model: nn.Module, batch: Any) -> Any:
        ran.append(1)
        if len(ran) == 3:
            trainer.request_stop("preempted")
        return model(batch[0])

    def build() -> tuple[Trainer, list[Any]]:
        hook = PreciseBN(interval=4, num_iter=3, by_epoch=False, forward=forward)
        return trained(
            make_trainer,
            LOADERS[loader](),
            hook,
            max_epochs=3,
            work_dir=tmp_path / "parts",
            default_hooks={"checkpoint": CheckpointHook()},
        )

    trainer, after = build()
    trainer.train()
    assert (trainer.iter, len(ran)) == (4, 3)
    first = after
    if resumes:
        trainer, after = build()
        trainer.resume()
    trainer.train()

    assert (first + after if resumes else after) == seen


class Once(PlaceInLoader):
    """Its own iterator, and with a state."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        raise StopIteration


def test_its_own_iterator_is_refused_with_a_state_too(make_trainer: Make) -> None:
    """A second pass over it would be the training's own."""
    with pytest.raises(TypeError, match=r"train_loader is an iterator \(Once\), which can be run only once"):
        trained(make_trainer, Once(), PreciseBN())


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("loader", "kind"),
    [
        (PlaceInLoader, "PlaceInLoader"),
        (lambda: loader_of(batch_size=SIZE, sampler=Saving()), "Saving"),
        (lambda: loader_of(batch_sampler=BatchSampler(Placed(), SIZE, drop_last=False)), "Placed"),
        (lambda: DataLoader(Stream(), SIZE), "Stream"),
    ],
    ids=["loader", "sampler", "in a batch sampler", "data set"],
)
def test_a_position_that_the_pass_would_move_is_refused(make_trainer: Make, loader: Any, kind: str) -> None:
    """A train loader that keeps its position needs another loader for the statistics, which may keep its own."""
    with pytest.raises(
        TypeError, match=rf"train_loader has a {kind} with a state_dict, .* give PreciseBN\(data_loader=...\)"
    ):
        trained(make_trainer, loader(), PreciseBN(num_iter=2))

    trainer, seen = trained(make_trainer, loader(), PreciseBN(num_iter=2, data_loader=loader()), max_epochs=1)
    trainer.train()

    assert len(seen) == PER_EPOCH


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own
@pytest.mark.parametrize(("kind", "workers"), [("shuffled", 0), ("shuffled", 2), ("stream", 2)])
def test_torchdata(make_trainer: Make, kind: str, workers: int) -> None:
    """So it is with torchdata's loader, in the middle of a pass and at its end."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        if kind == "stream":
            return torchdata.StatefulDataLoader(Stream(), SIZE, num_workers=workers)
        return torchdata.StatefulDataLoader(rows(), SIZE, shuffle=True, num_workers=workers)

    ends = []
    for hooks in ([], [PreciseBN(interval=2, num_iter=3, by_epoch=False)]):
        torch.manual_seed(3)
        trainer, seen = trained(make_trainer, loader(), *hooks, max_epochs=2)
        trainer.train()
        ends.append(seen)

    assert ends[0] == ends[1]
