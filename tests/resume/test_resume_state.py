"""Test less usual parts of a training's state: types of an optimizer's state, generators of modules and
loaders, lengths that change."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

from eventloop import Trainer
from eventloop.hooks import CheckpointHook, Hook
from tests.support.interrupted import assert_same, seed, state_of
from tests.support.trainers import MakeTrainer, batches, samples, shuffled, tiny_model

Make = Callable[[Path], Trainer]


def stop_at(trainer: Trainer, event: str, count: int) -> None:
    """Stop the run after so many iterations in all, or at the `count`-th event of another kind."""
    number = itertools.count(trainer.iter + 1 if event == "after_train_iter" else 1)
    trainer.bus.subscribe(
        lambda trainer, event: trainer.stop("enough") if next(number) == count else None, event
    )


def assert_went_on(
    make: Make, directory: Path, stops: list[int], *, event: str = "after_train_iter"
) -> dict[str, Any]:
    """Assert that a run interrupted at `stops` ends with the state of an uninterrupted one, and return that
    state."""
    seed()
    whole = make(directory / "whole")
    whole.train()
    for number, stop in enumerate([*stops, None]):
        seed(7 if not number else 99 + number)
        part = make(directory / "parts")
        if number:
            part.resume()
        if stop is not None:
            stop_at(part, event, stop)
        part.train()
        assert (part.iter < whole.iter) == (stop is not None)
    assert_same(state_of(part), state_of(whole))
    return state_of(part)


# --- the optimizer -----------------------------------------------------------------------------------------


class Mixed(torch.optim.SGD):
    """An optimizer with float32 copies of its weights, a count in bytes, and nested state of other types."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["master"] = parameter.float()
                state["nested"] = {"sums": [torch.zeros_like(parameter, dtype=torch.float64)]}
                state["count"] = torch.zeros((), dtype=torch.uint8)
            state["count"] += 1
            state["nested"]["sums"][0].add_(parameter.grad.double(), alpha=1 / 3)
            state["master"].sub_(state["nested"]["sums"][0].float(), alpha=self.param_groups[0]["lr"] / 3)
            parameter.copy_(state["master"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "own": lambda parameters: Mixed(parameters, lr=0.01),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
}


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("kind", "dtype"), [("own", torch.bfloat16), ("NAdam", torch.float64), ("NAdam", torch.bfloat16)]
)
def test_state_of_another_type_than_the_weights(
    make_trainer: MakeTrainer, tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    """An optimizer's state is restored in its own types, which PyTorch would convert to the weights' type."""

    def make(directory: Path) -> Trainer:
        model = tiny_model().to(dtype)
        return make_trainer(
            model=model,
            optimizer=OPTIMIZERS[kind](model.parameters()),
            work_dir=directory,
            max_epochs=3,
            train_step=lambda trainer, batch: trainer.model(batch[0].to(dtype)).logsumexp(1).sum(),
            hooks=[CheckpointHook(interval=-1)],
        )

    assert_went_on(make, tmp_path, [5])


def test_state_follows_weights_of_another_precision(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """If the precision of the weights was changed, the optimizer's state is converted to it."""
    first = make_trainer(hooks=[CheckpointHook(interval=-1)])
    first.train()
    model = tiny_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    second = make_trainer(model=model, optimizer=optimizer, max_epochs=3)

    second.resume(changed="apply")

    assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {torch.float64}


def test_refused_checkpoint_leaves_the_types_of_the_state(make_trainer: MakeTrainer) -> None:
    """A rollback restores an optimizer's state in its types."""

    class Refusing(Hook):
        def load_state_dict(self, state: Any) -> None:
            raise ValueError("no")

        def state_dict(self) -> dict[str, Any]:
            return {}

    model = tiny_model().to(torch.float64)
    trainer = make_trainer(
        model=model,
        optimizer=torch.optim.NAdam(model.parameters()),
        hooks=[Refusing()],
        train_step=lambda trainer, batch: trainer.model(batch[0].double()).sum(),
    )
    trainer.train()

    with pytest.raises(ValueError, match="no"):
        trainer.resume()

    assert {state["mu_product"].dtype for state in trainer.optimizer.state.values()} == {torch.float32}


# --- modules -----------------------------------------------------------------------------------------------


class Noise(nn.Module):
    """A module that draws from its own generators, and refers to the global one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.ours = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(3)
        self.python = random.Random(3)
        self.everyones = torch.default_generator

    def forward(self, inputs: torch.Tensor) -> Any:
        noise = torch.randn(inputs.shape, generator=self.ours) * float(self.numpy.random())
        return self.linear(inputs + noise * self.python.random())


@pytest.mark.parametrize("wrapped", [False, True])
def test_generators_of_modules_go_on(make_trainer: MakeTrainer, tmp_path: Path, wrapped: bool) -> None:
    """Generators among a module's attributes are restored, also inside a wrapper."""

    def make(directory: Path) -> Trainer:
        seed()
        model: Any = nn.Sequential(Noise(), nn.ReLU())
        hooks = [CheckpointHook(interval=-1)]
        given = nn.DataParallel(model) if wrapped else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return make_trainer(model=given, optimizer=optimizer, work_dir=directory, hooks=hooks)

    state = assert_went_on(make, tmp_path, [2, 4])

    assert [*state["rng"]["modules"]] == ["0.ours", "0.numpy", "0.python"]


class Drawing(Hook):
    """A hook that draws from two generators, whose states it saves as torch returns them."""

    def __init__(self) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
        self.drawn: list[float] = []

    def after_train_iter(self, trainer: Trainer, event: Any) -> None:
        self.drawn += [float(torch.rand((), generator=generator)) for generator in self.generators]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "generators": tuple(each.get_state() for each in self.generators)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.drawn = list(state["drawn"])
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            generator.set_state(saved)


def test_generators_of_hooks_go_on(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A hook gets the states of its generators as it gave them: torch reads one from the start of its memory."""

    def make(directory: Path) -> Trainer:
        seed()
        return make_trainer(work_dir=directory, hooks=[Drawing(), CheckpointHook(interval=-1)])

    assert_went_on(make, tmp_path, [2, 4])


# --- loaders -----------------------------------------------------------------------------------------------


class Noisy(Dataset[Any]):
    """A data set with a generator that adds noise."""

    def __init__(self, count: int) -> None:
        self._samples, self._rng = samples(count), np.random.default_rng(3)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self._samples[index]
        return inputs + self._rng.random(), target


class Growing(Sampler[int]):
    """A sampler with four indices more in each epoch."""

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return 8 + 4 * self._epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._epoch)
        return iter(torch.randperm(24, generator=generator)[: len(self)].tolist())


LOADERS: dict[str, Callable[[], Any]] = {
    "data set": lambda: DataLoader(Noisy(12), 4, shuffle=True),
    "loader": lambda: DataLoader(samples(12), 4, shuffle=True, generator=torch.Generator().manual_seed(1)),
    "growing": lambda: DataLoader(samples(24), 4, sampler=Growing()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
def test_loader_goes_on(make_trainer: MakeTrainer, tmp_path: Path, name: str) -> None:
    """Generators of the loader and the data set are restored, and a length that the epoch decides is not a
    change."""

    def make(directory: Path) -> Trainer:
        hooks = [CheckpointHook(interval=-1)]
        return make_trainer(train_loader=LOADERS[name](), max_epochs=3, work_dir=directory, hooks=hooks)

    assert_went_on(make, tmp_path, [4, 5])


class Slowing(Hook):
    """A hook that sets the rate from a validation's score, so that the validation's samples matter."""

    def after_val_epoch(self, trainer: Trainer, event: Any) -> None:
        if event.metrics:  # it was not cut short
            trainer.optimizer.param_groups[0]["lr"] = event.metrics["loss"] / 10


def evaluated(name: str) -> DataLoader[Any]:
    """Return a validation loader with a generator that only it has."""
    if name == "data set":
        return DataLoader(Noisy(8), 4)
    drawn = RandomSampler(range(24), num_samples=8, generator=torch.Generator().manual_seed(5))
    return DataLoader(samples(24), 4, sampler=drawn)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "event", "stop"), [("sampler", "before_val_iter", 3), ("data set", "after_train_iter", 4)]
)
def test_evaluation_draws_what_it_would_have(
    make_trainer: MakeTrainer, tmp_path: Path, name: str, event: str, stop: int
) -> None:
    """Validations draw the samples of the uninterrupted run, also if a stop came within one."""

    def make(directory: Path) -> Trainer:
        return make_trainer(
            val_loader=evaluated(name),
            max_iters=9,
            val_interval=2,
            hooks=[CheckpointHook(interval=-1), Slowing()],
            work_dir=directory,
        )

    assert_went_on(make, tmp_path, [stop], event=event)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "stop", "unit"),
    [
        ("before_val", 2, {}),
        ("before_val_iter", 4, {"max_iters": 13, "val_interval": 4}),
        ("after_val_iter", 6, {}),
    ],
)
def test_a_validation_that_is_cut_short(
    make_trainer: MakeTrainer, tmp_path: Path, event: str, stop: int, unit: dict[str, Any]
) -> None:
    """A validation that was cut short is repeated, and draws what the uninterrupted run draws once."""

    def make(directory: Path) -> Trainer:
        return make_trainer(
            train_loader=shuffled(5),
            val_loader=DataLoader(samples(12), 4),
            hooks=[CheckpointHook()],
            val_step=lambda trainer, batch: {"noise": torch.rand(())},
            work_dir=directory,
            **(unit or {"max_epochs": 4}),
        )

    assert_went_on(make, tmp_path, [stop], event=event)


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True], ids=["global", "shared"])
def test_workers_of_an_evaluation_that_persist(make_trainer: MakeTrainer, tmp_path: Path, own: bool) -> None:
    """Persistent workers of a validation loader change no random number of the resumed training."""
    made: list[Trainer] = []

    def make(directory: Path) -> Trainer:
        generator = torch.Generator().manual_seed(5) if own else None
        persistent = DataLoader(samples(12), 4, num_workers=1, persistent_workers=True, generator=generator)
        loaders = {"train_loader": shuffled(5, generator=generator), "val_loader": persistent}
        made.append(make_trainer(hooks=[CheckpointHook()], max_epochs=4, work_dir=directory, **loaders))
        return made[-1]

    assert_went_on(make, tmp_path, [7])
    for trainer in made:  # each worker of a loader that is collected with its trainer is waited for, for 5 s
        trainer.val_loader = None


def test_a_generator_that_both_loaders_have(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """With one generator in both loaders, the repeated validation draws before the next pass, as in the first
    run."""

    def make(directory: Path) -> Trainer:
        generator = torch.Generator().manual_seed(5)
        return make_trainer(
            train_loader=shuffled(5, generator=generator),
            max_epochs=3,
            work_dir=directory,
            val_loader=DataLoader(samples(12), 4, generator=generator),
            hooks=[CheckpointHook(interval=1)],
        )

    seed()
    whole = make(tmp_path / "whole")
    whole.train()
    seed(99)
    second = make(tmp_path / "second")

    second.resume(tmp_path / "whole" / "epoch_2")
    second.train()

    assert second.iter == whole.iter == 15
    assert_same(state_of(second), state_of(whole))


def test_sampler_of_an_evaluation_that_cannot_be_known(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names a validation loader's generator whose state the checkpoint lacks."""
    make_trainer(val_loader=batches(2), hooks=[CheckpointHook(interval=-1)]).train()
    second = make_trainer(val_loader=evaluated("data set"), max_epochs=3)

    with caplog.at_level(logging.WARNING, "eventloop"):
        second.resume()

    assert "the checkpoint has no state of dataset._rng" in caplog.text
