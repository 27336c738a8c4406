"""PreciseBN beside loaders and samplers that keep their place: training sees the batches it would have seen without."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from eventloop.hooks import CheckpointHook
from eventloop.hooks.precise_bn import PreciseBN
from eventloop.model.batchnorm_statistics import update_bn_stats
from eventloop.training.trainer import Trainer
from tests.resume.test_resume_samplers import Counted, Passes, Placed, Saving

Make = Callable[..., Trainer]

COUNT, SIZE = 22, 4
PER_EPOCH = -(-COUNT // SIZE)


def rows() -> list[Any]:
    """Samples whose input says which they are."""
    return [(torch.tensor([float(index), 0.0]), torch.zeros(1)) for index in range(COUNT)]


def batches() -> list[Any]:
    return list(DataLoader(rows(), SIZE))  # type: ignore[arg-type]


class PlaceInLoader:
    """Its passes share one place."""

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


class PlaceInPass:
    """Each pass has a place and an order of its own; the loader tells that of the newest one."""

    def __init__(self) -> None:
        self._batches, self._at, self._passes = batches(), 0, 0
        self._begin: int | None = None

    def __len__(self) -> int:
        return PER_EPOCH

    def __iter__(self) -> Iterator[Any]:
        begin, self._begin = self._begin, None
        self._passes += begin is None
        order = random.Random(self._passes).sample(range(PER_EPOCH), PER_EPOCH)
        for at in range(begin or 0, PER_EPOCH):
            self._at = at + 1
            yield self._batches[order[at]]
        self._at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at, "passes": self._passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._passes, self._begin = state["passes"], state["at"] or None


class Forgetful(PlaceInPass):
    """Forgets its place when a pass is closed."""

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from super().__iter__()
        finally:
            self._at = 0


class SavesItself(PlaceInPass, DataLoader[Any]):  # type: ignore[misc]
    """Each pass has a place of its own, and the loader is a DataLoader."""

    def __init__(self) -> None:
        DataLoader.__init__(self, rows(), SIZE)  # type: ignore[arg-type]
        PlaceInPass.__init__(self)


class NoSampler(Passes):
    """Decides the order, and is a Sampler by its methods alone."""

    def __len__(self) -> int:
        return COUNT


class Stream(IterableDataset[Any]):
    """Goes on where it is, with a state for a loader that asks; its last batch is whole, and does not end it."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < SIZE * PER_EPOCH:
            self.next += 1
            yield torch.tensor([float(self.next), 0.0]), torch.zeros(1)
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class AsksItsDataset(DataLoader[Any]):
    """As torchdata's StatefulDataLoader does."""

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": torch.tensor(self.dataset.next)}  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.next = int(state["dataset"])  # type: ignore[attr-defined]


LOADERS: dict[str, Callable[[], Any]] = {
    "place in the loader": PlaceInLoader,
    "place in the pass": PlaceInPass,
    "forgetful": Forgetful,
    "state": SavesItself,
    "dataset": lambda: AsksItsDataset(Stream(), SIZE),
    "saving sampler": lambda: DataLoader(rows(), SIZE, sampler=Saving()),  # type: ignore[arg-type]
    "placed sampler": lambda: DataLoader(rows(), SIZE, sampler=Placed()),  # type: ignore[arg-type]
    "counted sampler": lambda: DataLoader(rows(), SIZE, sampler=Counted()),  # type: ignore[arg-type]
    "duck": lambda: DataLoader(rows(), SIZE, sampler=NoSampler()),  # type: ignore[arg-type]
    "batch sampler": lambda: DataLoader(
        rows(),  # type: ignore[arg-type]
        batch_sampler=BatchSampler(Saving(), SIZE, drop_last=False),
    ),
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


class Turning(PlaceInLoader):
    """With its last batch its place is the beginning, of whatever pass is next."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(self._next, PER_EPOCH):
            self._next = (index + 1) % PER_EPOCH
            yield self._batches[index]


def test_a_pass_at_its_end_is_not_begun_again(make_trainer: Make) -> None:
    """Opened with the state that it has there, the loader would give the whole pass once more, and for ever."""
    trainer, seen = trained(
        make_trainer, Turning(), PreciseBN(interval=1, num_iter=2, by_epoch=False), max_epochs=2
    )

    trainer.train()

    assert [batch for _, batch in seen] == [batch[0][:, 0].tolist() for batch in batches()] * 2


RESUMABLE = [name for name in LOADERS if name != "counted sampler"]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [PER_EPOCH, PER_EPOCH + 2])
@pytest.mark.parametrize("loader", RESUMABLE)
def test_the_checkpoint_has_the_place_of_the_training(
    make_trainer: Make, tmp_path: Path, loader: str, stop: int
) -> None:
    """A checkpoint saved behind the pass, before training goes on, leads to the batches that were to come."""
    whole, seen = trained(make_trainer, LOADERS[loader](), max_epochs=3)
    whole.train()
    after = []
    for part, stop_at in enumerate((stop, None)):
        trainer, of_part = trained(
            make_trainer, LOADERS[loader](), PreciseBN(interval=1, num_iter=2, by_epoch=False), stop=stop_at,
            max_epochs=3, work_dir=tmp_path / "parts",
            default_hooks={"checkpoint": CheckpointHook(interval=1, by_epoch=False)},
        )  # fmt: skip
        if part:
            trainer.resume(tmp_path / "parts" / f"iter_{stop}")
        trainer.train()
        after += of_part

    assert after == seen


@pytest.mark.representative(2)
@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("loader", RESUMABLE)
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
            make_trainer, LOADERS[loader](), hook, max_epochs=3, work_dir=tmp_path / "parts",
            default_hooks={"checkpoint": CheckpointHook()},
        )  # fmt: skip

    trainer, after = build()
    trainer.train()
    assert (trainer.iter, len(ran)) == (4, 3)
    first = after
    if resumes:
        trainer, after = build()
        trainer.resume()
    trainer.train()

    assert (first + after if resumes else after) == seen


class Broken(PlaceInLoader):
    """Cannot read its fourth batch in a pass without gradients."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            if self._next == 4 and not torch.is_grad_enabled():
                raise OSError("the disk is gone")
            yield batch


def test_a_loader_that_raises_has_its_place(make_trainer: Make) -> None:
    """Where the loader fails in the middle of the pass, its state is put back first."""
    trainer, _ = trained(make_trainer, loader := Broken(), PreciseBN(interval=2), max_iters=6)

    with pytest.raises(OSError, match="the disk is gone"):
        trainer.train()

    assert loader.state_dict() == {"next": 2}


def test_several_passes_at_one_place(make_trainer: Make) -> None:
    """Hooks that run one after the other put back the place of the training, not that of the pass before."""
    whole, seen = trained(make_trainer, PlaceInPass(), max_epochs=2)
    whole.train()
    hooks = [PreciseBN(2, n, by_epoch=False) for n in (1, 2)]
    for number, hook in enumerate(hooks):
        hook.name = f"bn{number}"
    trainer, other = trained(make_trainer, PlaceInPass(), *hooks, max_epochs=2)

    trainer.train()

    assert other == seen


@pytest.mark.parametrize("at", [2, PER_EPOCH])
def test_a_whole_pass_from_within_one(make_trainer: Make, at: int) -> None:
    """A loader that goes on where it is gives a whole pass all the same: the rest, and the beginning."""
    means: list[torch.Tensor] = []
    trainer, _ = trained(make_trainer, PlaceInLoader(), PreciseBN(at, None), max_iters=at + 1)
    trainer.bus.subscribe(
        lambda trainer, event: means.append(trainer.model[0].running_mean[0].clone()), "after_train_iter",
        priority="LOWEST", every=at, once=True,
    )  # fmt: skip

    trainer.train()

    assert means[0].item() == pytest.approx((COUNT - 1) / 2)


def test_its_own_loader_with_a_state(make_trainer: Make) -> None:
    """A `data_loader` that is not the training's is at its place again, too."""
    own = PlaceInLoader()
    next(iter(own))
    trainer, _ = trained(make_trainer, PlaceInLoader(), PreciseBN(num_iter=3, data_loader=own))

    trainer.train()

    assert own.state_dict() == {"next": 1}


def test_by_itself_it_loads_the_state() -> None:
    """Without a trainer the loader is given its state back; `put_back` is for those who do more."""
    loader, told = PlaceInLoader(), list[Any]()
    layer = nn.BatchNorm1d(2)
    next(iter(loader))

    update_bn_stats(layer, loader, 2)
    update_bn_stats(layer, loader, 2, put_back=lambda given, state: told.append((given, state)))

    assert told == [(loader, {"next": 1})]
    assert loader.state_dict() == {"next": 3}


def test_an_empty_loader_with_a_state_is_refused() -> None:
    """One that has nothing is not asked forever for what comes after the rest."""
    loader = PlaceInLoader()
    loader.__class__ = type("Empty", (PlaceInLoader,), {"__iter__": lambda self: iter(())})

    with pytest.raises(ValueError, match="the data loader gave none: it is empty"):
        update_bn_stats(nn.BatchNorm1d(2), loader, 2)


class Unplaced(PlaceInLoader):
    """Keeps its place, and has no state."""

    load_state_dict = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (Unplaced, "has changed _next of the Unplaced it read"),
        (lambda: DataLoader(Stream(), SIZE), "has changed next of the Stream it read"),
    ],
    ids=["loader", "dataset"],
)
def test_a_place_that_cannot_be_put_back_is_told(
    make_trainer: Make, caplog: pytest.LogCaptureFixture, loader: Callable[[], Any], says: str
) -> None:
    """Where a number of the loader, or of a stream it reads here, has changed, and there is no state to put back, one
    line says that training may miss batches."""
    trainer, _ = trained(make_trainer, loader(), PreciseBN(num_iter=2))

    trainer.train()

    told = [line for line in caplog.messages if "precise statistics" in line]
    assert len(told) == 1
    assert says in told[0]
    assert (
        "give the loader state_dict and load_state_dict, or give PreciseBN a data_loader of its own"
        in told[0]
    )


@pytest.mark.parametrize("loader", [batches, lambda: DataLoader(rows(), SIZE, sampler=Counted())])  # type: ignore[arg-type]
def test_nothing_is_told_where_no_place_is_lost(
    make_trainer: Make, caplog: pytest.LogCaptureFixture, loader: Callable[[], Any]
) -> None:
    """Lists and loaders that are run as a copy give no warning."""
    trainer, _ = trained(make_trainer, loader(), PreciseBN(num_iter=2))

    trainer.train()

    assert "precise statistics has changed" not in caplog.text


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


def test_a_shared_sampler_is_copied_once() -> None:
    """A sampler that two others draw from is still one in the copy."""

    class Twice(Sampler[int]):
        def __init__(self, first: Any, second: Any) -> None:
            self.first, self.second = first, second

        def __len__(self) -> int:
            return COUNT

        def __iter__(self) -> Iterator[int]:
            next(iter(self.first))
            return iter(self.second)

    saving, layer = Saving(), nn.BatchNorm1d(2)
    drawn: list[list[float]] = []
    loader: Any = DataLoader(rows(), SIZE, sampler=Twice(saving, saving))  # type: ignore[arg-type]

    update_bn_stats(layer, loader, None, forward=lambda model, batch: drawn.append(batch[0][:, 0].tolist()))

    assert saving.state_dict() == {"passes": 0}
    assert [int(i) for part in drawn for i in part] == random.Random(2).sample(range(COUNT), COUNT)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shuffled", "sampler", "stream"])
def test_torchdata(make_trainer: Make, kind: str, workers: int) -> None:
    """So it is with torchdata's loader, in the middle of a pass and at its end."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")

    def loader() -> Any:
        if kind == "stream":
            return torchdata.StatefulDataLoader(Stream(), SIZE, num_workers=workers)
        if kind == "shuffled":
            return torchdata.StatefulDataLoader(rows(), SIZE, shuffle=True, num_workers=workers)
        own = samplers.StatefulDistributedSampler(range(COUNT), 1, 0)
        return torchdata.StatefulDataLoader(rows(), SIZE, sampler=own, num_workers=workers)

    ends = []
    for hooks in ([], [PreciseBN(interval=2, num_iter=3, by_epoch=False)]):
        torch.manual_seed(3)
        trainer, seen = trained(make_trainer, loader(), *hooks, max_epochs=2)
        trainer.train()
        ends.append(seen)

    assert ends[0] == ends[1]
