"""Attributes of hooks that a command sets: those in `tunable`, by the hook's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.hooks import CheckpointHook, EarlyStoppingHook, Hook, OptimizerHook
from eventloop.steering.set_values import set_values
from tests.steering.set_runs import ITERS, outcomes, receive, set_run, setting

Build = Callable[..., Trainer]


class Kinds(Hook):
    """A user's hook with attributes of several kinds."""

    tunable = ("number", "count", "on", "text", "items")

    def __init__(self) -> None:
        self.number, self.count, self.on, self.text, self.items = 0.5, 3, False, "a", [1]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Return a function that builds trainers, each in a directory of its own."""
    made: list[Trainer] = []

    def make(*hooks: Hook, **options: Any) -> Trainer:
        made.append(set_run(tmp_path / str(len(made)), hooks=hooks, **options))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("number", "2", 2.0),
        ("number", 2, 2.0),
        ("count", "7", 7),
        ("on", "true", True),
        ("text", "b", "b"),
        ("items", [2, 3], [2, 3]),
    ],
)
def test_a_value_has_the_type_of_the_present_one(build: Build, name: str, given: Any, value: Any) -> None:
    """A text or a JSON value is converted, and the answer has both values."""
    hook = Kinds()
    former = getattr(hook, name)

    answer = set_values(build(hook), {f"kinds.{name}": given})

    assert (getattr(hook, name), type(getattr(hook, name))) == (value, type(value))
    assert answer == {f"kinds.{name}": {"old": former, "new": value}}


@pytest.mark.parametrize("name", ["EarlyStoppingHook", "early_stopping_hook", "early_stopping"])
def test_a_hook_has_its_name_and_that_in_lower_case(build: Build, name: str) -> None:
    """`early_stopping` is the EarlyStoppingHook."""
    hook = EarlyStoppingHook("loss")

    set_values(build(hook), {f"{name}.patience": 9})

    assert hook.patience == 9


def test_a_run_stops_by_the_patience_that_was_set(build: Build) -> None:
    """A patience that is set below the validations that were waited for stops the run at its next validation."""
    trainer = build(EarlyStoppingHook("loss", patience=50, min_delta=1e9))
    receive(trainer, 13, setting({"early_stopping.patience": 2}))

    trainer.train()

    assert trainer.iter == 15  # the next validation is at the end of that epoch
    assert trainer.iter < ITERS


def test_a_run_stops_by_the_threshold_that_was_set(build: Build) -> None:
    """A threshold that was None takes a number."""
    trainer = build(EarlyStoppingHook("loss", patience=50))
    receive(trainer, 4, setting({"early_stopping.stopping_threshold": "1000"}))

    trainer.train()

    assert trainer.iter == 6


def test_the_improvement_that_counts_is_set(build: Build) -> None:
    """A `min_delta` that no score reaches any more uses the patience up."""
    trainer = build(EarlyStoppingHook("loss", patience=3, rule="greater", min_delta=1e-9, strict=False))
    hook = next(hook for hook in trainer.hooks if isinstance(hook, EarlyStoppingHook))
    hook.best = 1.0

    set_values(trainer, {"early_stopping.min_delta": 0.5})

    assert hook._signed_to_beat == 1.5


def test_the_interval_of_checkpoints_is_set(build: Build) -> None:
    """Checkpoints are saved in the new interval from there on."""
    saved: list[str] = []
    trainer = build(CheckpointHook(interval=10, by_epoch=False, save_last=False))
    trainer.bus.subscribe(lambda trainer, event: saved.append(Path(event.path).name), "checkpoint_saved")
    receive(trainer, 11, setting({"checkpoint.interval": 3}))

    trainer.train()

    assert saved == ["iter_10", "iter_12", "iter_15", "iter_18", "iter_21", "iter_24"]


def test_the_interval_of_the_log_is_set(build: Build) -> None:
    """Metrics are logged in the new interval from there on."""
    steps: list[int] = []
    trainer = build(default_hooks={"logger": {"interval": 1}}, max_epochs=2)
    trainer.bus.subscribe(
        lambda event: steps.append(event.step) if event.mode == "train" else None,
        "scalars_logged",
        offload="thread",
    )
    receive(trainer, 3, setting({"logger.interval": 3}))

    trainer.train()
    trainer.close()

    assert steps == [1, 2, 3, 6]


def test_the_norm_of_clipping_is_set(build: Build) -> None:
    """With plain SGD and a rate of 1 the weights move by the new norm."""
    trainer = build(
        default_hooks={"optimizer": OptimizerHook(grad_clip={"max_norm": 1e-2})},
        optimizer=lambda groups, lr: torch.optim.SGD(
            [{**group, "lr": 1.0} for group in groups], momentum=0.0
        ),
    )
    for group in trainer.optimizer.param_groups:
        group["momentum"] = 0.0
    receive(trainer, 4, setting({"optimizer.max_norm": 1e-3}))
    moved: list[float] = []
    former: list[torch.Tensor] = []

    def weights(trainer: Trainer) -> torch.Tensor:
        return torch.cat([each.detach().flatten().double() for each in trainer.model.parameters()])

    trainer.bus.subscribe(lambda trainer, event: former.append(weights(trainer)), "before_train_iter")
    trainer.bus.subscribe(
        lambda trainer, event: moved.append((weights(trainer) - former[-1]).norm().item()),
        "after_train_iter",
        priority="LOWEST",
    )
    results = outcomes(trainer)

    trainer.train()

    assert results == [{"optimizer.max_norm": {"old": 1e-2, "new": 1e-3}}]
    assert moved[3:5] == pytest.approx([1e-2, 1e-3], rel=1e-2)
