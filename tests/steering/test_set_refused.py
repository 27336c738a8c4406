"""What `set` refuses: nothing has changed then, and the answer says what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.hooks import CheckpointHook, EarlyStoppingHook, Hook
from eventloop.steering.protocols import CommandError
from eventloop.steering.set_values import set_values
from tests.steering.set_runs import outcomes, receive, set_run, setting

Build = Callable[..., Trainer]


class Thresholded(Hook):
    """A user's hook with attributes of several kinds."""

    tunable = ("threshold", "count", "on", "fixed", "picky")

    def __init__(self) -> None:
        self.threshold, self.count, self.on = 0.5, 3, False
        self.secret = 1
        self._picky = 1.0

    @property
    def fixed(self) -> int:
        """A number that cannot be set."""
        return 4

    @property
    def picky(self) -> float:
        """A number up to 1."""
        return self._picky

    @picky.setter
    def picky(self, value: float) -> None:
        if value > 1:
            raise ValueError(f"picky must be at most 1, got {value}")
        self._picky = value


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Return a function that builds trainers with hooks that can be set."""
    made: list[Trainer] = []

    def make(**options: Any) -> Trainer:
        hooks = [Thresholded(), EarlyStoppingHook("loss"), CheckpointHook()]
        made.append(set_run(tmp_path / str(len(made)), options.pop("kind", "StepLR"), hooks=hooks, **options))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def groups_of(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the values of the param groups."""
    optimizer = trainer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, 'set expects NAME=VALUE, such as lr=1e-4 or "lr*=0.5", got nothing'),
    ({"lr": -1}, "lr[0] must be at least 0, got -1"),
    ({"lr": "-1e-4"}, "lr[0] must be at least 0, got -0.0001"),
    ({"lr": "nan"}, "lr[0] expects a finite number, got 'nan'"),
    ({"lr": "inf"}, "lr[0] expects a finite number, got 'inf'"),
    ({"lr": "fast"}, "lr[0] expects a finite number, got 'fast'"),
    ({"lr": True}, "lr[0] expects a finite number, got True"),
    ({"lr": None}, "lr[0] expects a finite number, got None"),
    ({"lr": [0.1]}, "lr[0] expects a finite number, got [0.1]"),
    ({"lr*": -1}, "lr[0]* expects a factor of at least 0, got -1"),
    ({"lr*": 1e308, "lr": 1e308, " lr *": 1e300}, "lr[0] must be a finite number, got inf"),
    ({"momentum": -0.1}, "momentum[0] must be at least 0, got -0.1"),
    ({"lr[2]": 0.1}, "lr[2]: expected the index of a param group, 0 to 1, got '2'"),
    ({"lr[head]": 0.1}, "lr[head]: expected the index of a param group, 0 to 1, got 'head'"),
    (
        {"wieght_decay": 0.1},
        "set has nothing named 'wieght_decay': did you mean 'weight_decay'?; what can be set: ",
    ),
    ({"gen.lr": 0.1}, "set has nothing named 'gen.lr'"),
    (
        {"nesterov": 1},
        "nesterov is an option of SGD that is no number: its value is False, which cannot be set",
    ),
    ({"foreach": 1}, "foreach is an option of SGD that is no number: its value is None, which cannot be set"),
    ({"initial_lr": 0.1}, "set has nothing named 'initial_lr'"),
    ({"params": 0.1}, "set has nothing named 'params'"),
    (
        {"early_stopping.patience": "many"},
        "early_stopping.patience expects a value of the type int, got 'many'",
    ),
    (
        {"early_stopping.patience": "5.5"},
        "early_stopping.patience expects a value of the type int, got '5.5'",
    ),
    (
        {"early_stopping.patience": -1},
        "early_stopping.patience=-1 was refused: patience must be at least 0, got -1",
    ),
    ({"early_stopping.min_delta": "nan"}, "early_stopping.min_delta expects a finite number, got 'nan'"),
    (
        {"early_stopping.min_delta*": 2},
        "early_stopping.min_delta is an attribute of a hook: expected early_stopping.min_",
    ),
    ({"early_stopping.wait": 0}, "set has nothing named 'early_stopping.wait'"),
    ({"thresholded.picky": 2}, "thresholded.picky=2 was refused: picky must be at most 1, got 2.0"),
    (
        {"thresholded.fixed": 2},
        "thresholded.fixed=2 was refused: property 'fixed' of 'Thresholded' object has no setter",
    ),
    ({"thresholded.secret": 2}, "set has nothing named 'thresholded.secret'"),
    ({"thresholded._picky": 2}, "set has nothing named 'thresholded._picky'"),
    ({"optimizer.max_norm": 2}, "set has nothing named 'optimizer.max_norm'"),  # nothing is clipped
    ({"checkpoint.interval": 0}, "checkpoint.interval=0 was refused: interval must be at least 1, got 0"),
    ({"model.x": 1}, "set has nothing named 'model.x'"),
    ({"__class__": 1}, "set has nothing named '__class__'"),
    ({"hooks[0]": 1}, "set has nothing named 'hooks[0]'"),
    ({"early_stopping.__class__": 1}, "set has nothing named 'early_stopping.__class__'"),
    ({"lr; import os": 1}, "set has nothing named 'lr; import os'"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_a_wrong_name_or_value_is_refused(build: Build, arguments: dict[str, Any], message: str) -> None:
    """The reason has the name, what was expected and what came."""
    with pytest.raises(CommandError, match=re.escape(message)):
        set_values(build(), arguments)


@pytest.mark.parametrize(("arguments", "message"), [pair for pair in REFUSED if pair[0]])
def test_all_or_nothing_is_set(build: Build, arguments: dict[str, Any], message: str) -> None:
    """A refused value leaves the values before it as they were, those of hooks too."""
    trainer = build()
    before = groups_of(trainer)
    stopping = next(hook for hook in trainer.hooks if isinstance(hook, EarlyStoppingHook))

    with pytest.raises(CommandError):
        set_values(trainer, {"weight_decay": 0.5, "early_stopping.patience": 7, "momentum": 0.1, **arguments})

    assert groups_of(trainer) == before
    assert stopping.patience == 5


@pytest.mark.parametrize(("name", "value"), [("momentum", 1), ("beta2", "1.0"), ("beta2", -0.1)])
def test_the_betas_stay_below_one(build: Build, name: str, value: Any) -> None:
    """Both of Adam's betas are checked as its constructor does."""
    with pytest.raises(CommandError, match=rf"{name}\[0\] must be at least 0 and below 1, got"):
        set_values(build(optimizer=torch.optim.Adam), {name: value})


def test_betas_are_set_one_by_one(build: Build) -> None:
    """`betas` is refused with the two names to use."""
    trainer = build(optimizer=torch.optim.Adam)

    with pytest.raises(
        CommandError, match="betas are two numbers: set momentum for the first and beta2 for the"
    ):
        set_values(trainer, {"betas": "0.9,0.99"})

    set_values(trainer, {"momentum": 0.8, "beta2": 0.99})
    assert [group["betas"] for group in groups_of(trainer)] == [(0.8, 0.99), (0.8, 0.99)]


def test_an_option_that_was_off_and_needs_a_state_is_refused(build: Build) -> None:
    """RMSprop makes its momentum's buffer in its first step only, so a momentum that was 0 cannot be set later."""
    trainer = build(optimizer=lambda groups, lr: torch.optim.RMSprop(groups, lr=lr, momentum=0.0))
    for group in trainer.optimizer.param_groups:
        group["momentum"] = 0
    results = outcomes(trainer)
    receive(trainer, 4, setting(momentum=0.9), setting({"lr*": 0.5}))

    trainer.train()

    assert results[0] == (
        "momentum[0] was 0 and cannot be set within a run: RMSprop needs the state 'momentum_buffer'"
    )
    assert [group["momentum"] for group in groups_of(trainer)] == [0, 0]


def test_a_count_stays_an_int(build: Build) -> None:
    """An option that counts, such as LBFGS's `max_iter`, takes ints only."""
    model = torch.nn.Linear(2, 3)
    trainer = build()
    trainer.optimizer = torch.optim.LBFGS(model.parameters())

    with pytest.raises(CommandError, match=r"max_iter must be an int, got 2\.5"):
        set_values(trainer, {"max_iter": "2.5"})

    assert set_values(trainer, {"max_iter": "7"}) == {"max_iter": {"old": 20, "new": 7}}
    assert type(trainer.optimizer.param_groups[0]["max_iter"]) is int


def test_without_an_optimizer_only_hooks_are_set(build: Build) -> None:
    """A trainer without an optimizer refuses `lr`, and lists the hooks' attributes."""
    trainer = build()
    trainer.optimizer = None

    with pytest.raises(
        CommandError, match=r"set has nothing named 'lr'.*what can be set: .*early_stopping\.patience"
    ):
        set_values(trainer, {"lr": 0.1})


def test_tunable_must_be_a_tuple() -> None:
    """A forgotten comma is an error when the class is defined."""
    with pytest.raises(TypeError, match=r"Wrong\.tunable must be a tuple of names .* got 'patience'"):

        class Wrong(Hook):
            tunable = "patience"  # type: ignore[assignment]
