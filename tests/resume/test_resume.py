"""Test that a resumed run ends bitwise where the uninterrupted run ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError
from eventloop.hooks import CheckpointHook, Hook
from tests.support.interrupted import assert_same, seed, state_of, stopped
from tests.support.trainers import MakeTrainer, collect, record, samples, shuffled, tiny_model


class Counting(Hook):
    """A hook with a state of its own."""

    def __init__(self) -> None:
        self.iterations = 0

    def after_train_iter(self, trainer: Trainer, event: Any) -> None:
        self.iterations += 1

    def state_dict(self) -> dict[str, Any]:
        return {"iterations": self.iterations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.iterations = state["iterations"]


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples with noise from all three global generators."""

    def __init__(self, count: int) -> None:
        self._samples = samples(count)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self._samples[index]
        return inputs + torch.randn(2) + random.random() + float(np.random.rand()), target


def plain(**options: Any) -> Any:
    """Return a loader that is shuffled by the global random state."""
    return shuffled(5, **options)


def with_generator() -> Any:
    """Return a loader that is shuffled by its own generator."""
    return plain(generator=torch.Generator().manual_seed(5))


def with_sampler() -> Any:
    """Return a loader whose sampler has a generator, and whose samples have noise from every global one."""
    data = Noisy(20)
    return DataLoader(data, 4, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(5)))


LOADERS = [with_sampler, plain, with_generator]


def build(
    make_trainer: MakeTrainer, directory: Path, loader: Any, save_every: int = 1, **changes: Any
) -> Trainer:
    """Return a trainer with every stateful part."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    arguments = {
        "hooks": [Counting(), CheckpointHook(interval=save_every, save_best="loss")],
        "max_epochs": 6,
        "val_loader": shuffled(2),
    }
    return make_trainer(
        model=model,
        optimizer=optimizer,
        train_loader=loader,
        work_dir=directory,
        schedulers=[torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)],
        **{**arguments, **changes},
    )


WholeRun = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ends() -> dict[Any, dict[str, Any]]:
    """Return a cache of the final states of uninterrupted runs, by loader and unit."""
    return {}


@pytest.fixture
def whole_run(make_trainer: MakeTrainer, tmp_path: Path, ends: Any) -> WholeRun:
    """Return a function that returns the final state of the uninterrupted run, which is trained once."""

    def run(loader: Callable[[], Any], **changes: Any) -> dict[str, Any]:
        key = loader, "max_iters" in changes
        if key not in ends:
            seed()
            whole = build(make_trainer, tmp_path / "whole", loader(), **changes)
            whole.train()
            ends[key] = state_of(whole)
        return dict(ends[key])

    return run


ITERATIONS: dict[str, Any] = {"max_epochs": None, "max_iters": 13, "val_interval": 4, "save_every": 3}
STOPS: list[tuple[int, dict[str, Any]]] = [
    (5, ITERATIONS),
    (7, {}),
    (15, {}),
    (10, {}),
    (29, {}),
    (4, ITERATIONS),
]
"""Between epochs, within one, or in an epoch's last iteration; and anywhere in a run of iterations."""


@pytest.mark.representative(2)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(("stop", "unit"), STOPS, ids=lambda value: str(value)[:12])
def test_resumed_run_equals_the_uninterrupted_one(
    make_trainer: MakeTrainer,
    whole_run: WholeRun,
    tmp_path: Path,
    loader: Callable[[], Any],
    stop: int,
    unit: Any,
) -> None:
    """A run that is stopped anywhere and resumed by a new trainer ends with the state of the uninterrupted
    run."""
    whole = whole_run(loader, **unit)
    seed()
    first = stopped(build(make_trainer, tmp_path / "parts", loader(), **unit), stop)
    seed(99)
    second = build(make_trainer, tmp_path / "parts", loader(), **unit)

    seen = collect(second, "before_train_epoch", "before_train_iter")
    second.resume()
    second.train()

    assert (first.iter, second.iter) == (stop, 13 if unit else 30)
    assert_same(state_of(second), whole)
    if stop == 7:  # within an epoch, which begins again with the counters of the batch that comes next
        assert [(event.iter, event.epoch) for event in seen[:2]] == [(7, 1)] * 2
        assert seen[1].batch_idx == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["epoch_1", "other/parts/iter_5", "best_loss_epoch_1"])
def test_any_file_can_be_resumed_from(make_trainer: MakeTrainer, tmp_path: Path, name: str) -> None:
    """Every kind of checkpoint leads to the same end, and each validation is run exactly once."""

    def trainer() -> Trainer:
        hooks = [
            Counting(),
            CheckpointHook(1, save_best="loss", rule="greater"),
            CheckpointHook(5, by_epoch=False, out_dir=tmp_path / "parts" / "other"),
        ]
        return build(make_trainer, tmp_path / "parts", plain(), max_epochs=2, hooks=hooks)

    seed()
    whole, second = trainer(), trainer()
    validations, again = record(whole, "after_val_epoch"), record(second, "after_val_epoch")
    whole.train()
    expected = state_of(whole)

    second.resume(tmp_path / "parts" / name)
    second.train()

    assert validations == [("after_val_epoch", 5, 1), ("after_val_epoch", 10, 2)]
    assert again == (validations[1:] if name.startswith("best") else validations)
    assert_same(state_of(second)["state_dict"], expected["state_dict"])


def test_modules_that_take_their_shape_from_the_first_batch(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """Lazy modules take their shapes from the checkpoint; a checkpoint without their weights is refused."""

    def lazy(name: str) -> Trainer:
        model = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return make_trainer(model=model, optimizer=optimizer, train_loader=plain(), work_dir=tmp_path / name)

    seed()
    whole = lazy("whole")
    whole.train()
    seed()
    stopped(lazy("parts"), 7)
    second = lazy("parts")

    second.resume()
    second.train()

    assert_same(state_of(second), state_of(whole))
    other = make_trainer(model=torch.nn.Sequential(torch.nn.ReLU(), torch.nn.LazyLinear(8)), optimizer=None)
    with pytest.raises(CheckpointError, match=r"1\.weight: no shape yet in the model, not in the checkpoint"):
        other.load_checkpoint(tmp_path / "parts" / "iter_7")


@pytest.mark.saver_process
def test_a_validation_cut_short_is_run_after_the_resume(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A run that was stopped within a validation begins with that validation when it is resumed."""
    first = build(make_trainer, tmp_path, plain(), hooks=[CheckpointHook(interval=100)])
    first.bus.subscribe(lambda trainer, event: trainer.stop("enough"), "before_val_iter", once=True)
    first.train()
    second = build(make_trainer, tmp_path, plain(), hooks=[CheckpointHook(interval=100)])
    rows = record(second, "before_train", "after_val_epoch", "before_train_epoch")

    second.resume()
    second.train()

    assert rows[:3] == [("before_train", 5, 1), ("after_val_epoch", 5, 1), ("before_train_epoch", 5, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [8, 100], ids=["by the interval", "at the end"])
def test_a_finished_run_of_iterations_is_prolonged(
    make_trainer: MakeTrainer, tmp_path: Path, save_every: int
) -> None:
    """A finished run that is made longer goes on within its last pass, and does not repeat a completed
    validation."""
    options: dict[str, Any] = {**ITERATIONS, "save_every": save_every}
    seed()
    whole = build(make_trainer, tmp_path / "whole", plain(), **{**options, "max_iters": 20})
    whole.train()
    seed()
    build(make_trainer, tmp_path / "parts", plain(), **{**options, "max_iters": 8}).train()
    seed(99)
    second = build(make_trainer, tmp_path / "parts", plain(), **{**options, "max_iters": 20})
    validations = record(second, "after_val_epoch")

    second.resume(tmp_path / "parts" / "iter_8")
    second.train()

    again = [8] if save_every == 8 else []  # that one was saved before it
    assert [iteration for _, iteration, _ in validations] == [*again, 12, 16, 20]
    for part in ("state_dict", "optimizer", "param_schedulers", "rng"):
        assert_same(state_of(second)[part], state_of(whole)[part])
