"""A run whose values were set by commands is resumed, and repeated, as if it had not been interrupted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_lr

from eventloop import Trainer
from eventloop.hooks import CheckpointHook, EarlyStoppingHook
from tests.steering.set_runs import (
    AT,
    ITERS,
    SCHEDULES,
    Rates,
    receive,
    scaled,
    set_run,
    setting,
    values,
    window,
)
from tests.support.interrupted import assert_same, stop_after
from tests.support.trainers import batches

# SequentialLR of older releases of torch steps its parts in the way that torch itself warns of
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")

STOP = 13
"""The number of iterations after which a run is interrupted, in the middle of an epoch."""

Build = Callable[..., Trainer]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Return a function that builds trainers in directories by their names, which save a checkpoint at the end."""
    made: list[Trainer] = []

    def make(name: str, kind: str = "none", **options: Any) -> Trainer:
        made.append(
            set_run(tmp_path / name, kind, hooks=[CheckpointHook(), *options.pop("hooks", [])], **options)
        )
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def interrupted(trainer: Trainer, name: str = "lr") -> Rates:
    """Train until `STOP`."""
    stop_after(trainer, STOP)
    return values(trainer, name)


def parts(trainer: Trainer) -> tuple[Any, Any, Any]:
    """Return the weights, and the states of the optimizer and the schedulers."""
    schedulers = [_plain(each.state_dict()) for each in trainer.schedulers]
    assert isinstance(trainer.optimizer, torch.optim.Optimizer)
    return dict(trainer.model.state_dict()), trainer.optimizer.state_dict(), schedulers


def _plain(state: Any) -> Any:
    """Return a scheduler's state without the class of its milestones, which a checkpoint does not keep."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return [*map(_plain, state)] if isinstance(state, list) else state


@pytest.mark.representative(5)
@pytest.mark.parametrize("kind", [kind for kind in SCHEDULES if kind not in ("LambdaLR", "MultiplicativeLR")])
def test_a_steered_run_is_resumed_to_the_bit(build: Build, kind: str) -> None:
    """Interrupted after the command and resumed by a new trainer, without `changed`, it ends with the same bits."""
    whole = build("whole", kind)
    receive(whole, AT, setting({"lr*": 0.37}))
    expected = values(whole)
    first = build("parts", kind)
    receive(first, AT, setting({"lr*": 0.37}))
    found = interrupted(first)
    second = build("parts", kind)
    second.resume()

    found += values(second)

    assert found == expected
    assert_same(parts(second), parts(whole))


def test_a_rate_in_a_tensor_is_resumed_to_the_bit(build: Build) -> None:
    """The factor of a rate in a tensor is in the checkpoint like any other."""
    found: list[Any] = []
    for name in ("whole", "parts"):
        trainer = build(name, "SequentialLR", lr=torch.tensor(0.1))
        receive(trainer, AT, setting(lr=0.0123))
        if name == "parts":
            interrupted(trainer)
            trainer = build(name, "SequentialLR", lr=torch.tensor(0.1))
            trainer.resume()
        trainer.train()
        found.append(parts(trainer))

    assert_same(*found)


def test_a_steered_value_is_no_changed_setting(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    """A run whose rate, weight decay and patience were set resumes without `changed`, and without a warning."""
    given = setting({"lr": 0.004, "weight_decay": 0.01, "early_stopping.patience": 30})

    def run() -> Trainer:
        return build("run", "windows", hooks=[EarlyStoppingHook("loss", patience=20)])

    first = run()
    receive(first, AT, given)
    interrupted(first)
    second = run()
    with caplog.at_level(logging.WARNING, "eventloop"):
        second.resume()

    assert [record.getMessage() for record in caplog.records] == []
    assert isinstance(second.optimizer, torch.optim.Optimizer)
    assert [group["weight_decay"] for group in second.optimizer.param_groups] == [0.01, 0.01]


EDITS: dict[str, tuple[Any, Any]] = {
    "StepLR": (lambda o: [torch_lr.StepLR(o, 5, 0.3)], lambda o: [torch_lr.StepLR(o, 4, 0.8)]),
    "PolyLR": (lambda o: [window("PolyLR", end=18)], lambda o: [window("PolyLR", end=ITERS)]),
    "OneCycleLR": (
        lambda o: [torch_lr.OneCycleLR(o, 0.5, ITERS)],
        lambda o: [torch_lr.OneCycleLR(o, 0.7, ITERS)],
    ),
}
"""A schedule, and what it is edited to."""


@pytest.mark.parametrize("kind", EDITS)
def test_an_edited_schedule_is_multiplied_by_the_factor(build: Build, kind: str) -> None:
    """With `changed="apply"` the script's new schedule counts, times what the command has set."""
    before, after = EDITS[kind]
    first = build("run", schedule=before)
    receive(first, AT, setting({"lr*": 0.37}))
    interrupted(first)
    second = build("run", schedule=after)
    second.resume(changed="apply")

    found = values(second)

    expected = scaled(values(build("edited", schedule=after)), [0.37, 0.37], STOP)[STOP:]
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-9)


def test_an_edited_rate_is_multiplied_by_the_factor(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    """With `changed="apply"` an edited base rate counts, times what the command has set, and the log says so."""
    first = build("run", "StepLR")
    receive(first, AT, setting({"lr*": 0.37}))
    interrupted(first)
    second = build("run", "StepLR", lr=0.3)
    second.resume(changed="apply")
    assert (
        "lr of param group 0 is what its schedules give times 0.37, as commands have set: 0.00999"
        in caplog.text
    )

    found = values(second)

    expected = scaled(values(build("edited", "StepLR", lr=0.3)), [0.37, 0.37], STOP)[STOP:]
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-9)


def test_an_edited_value_without_a_schedule_keeps_the_proportion(build: Build) -> None:
    """With `changed="apply"` a weight decay that a command has halved is half of the edited one."""

    def run(decay: float) -> Trainer:
        return build("run", optimizer=lambda groups, lr: torch.optim.SGD(groups, lr=lr, weight_decay=decay))

    first = run(0.1)
    receive(first, AT, setting({"weight_decay*": 0.5}))
    interrupted(first)
    second = run(0.2)
    second.resume(changed="apply")

    assert isinstance(second.optimizer, torch.optim.Optimizer)
    assert [group["weight_decay"] for group in second.optimizer.param_groups] == pytest.approx([0.1, 0.1])


def test_a_hook_is_set_again_after_a_resume(build: Build) -> None:
    """The patience that a command has set ends the resumed run, although its script has another."""

    def run() -> Trainer:
        hooks = [EarlyStoppingHook("loss", patience=50, min_delta=1e9)]
        return build("run", hooks=hooks, train_loader=batches(3))

    first = run()
    receive(first, AT, setting({"early_stopping.patience": 6}))
    stop_after(first, STOP)
    first.train()
    second = run()
    second.resume()

    second.train()

    assert second.iter == 7 * 3  # the first validation is the best, and six others follow
    assert "early stopping" in (second.stop_reason or "")


def test_a_value_that_the_hook_refuses_now_is_logged(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    """If the resumed script's hook refuses what was set, the run goes on with the script's value, and says so."""
    first = build("run")
    receive(first, AT, setting({"checkpoint.interval": 5}))
    first_hook = next(hook for hook in first.hooks if isinstance(hook, CheckpointHook))
    first_hook._interval = 4
    interrupted(first)
    second = build("run")
    second.resume()
    caplog.clear()

    with caplog.at_level(logging.WARNING, "eventloop"):
        second.train()

    assert (
        "checkpoint.interval, set after iteration 7, is not set again: checkpoint.interval=5 was refused: "
        "the hook acts at no interval (interval=-1)"
    ) in caplog.text


def test_a_repetition_of_a_steered_run_has_its_bits(build: Build, tmp_path: Path) -> None:
    """`Trainer(commands=...)` sets the rate again after the same iteration: rates and weights are the steered run's."""
    steered = build("steered", "SequentialLR")
    receive(steered, AT, setting(lr=0.0123), setting({"momentum*": 0.9}))
    receive(steered, 16, setting({"lr*": 3}))
    expected = values(steered)

    again = build("again", "SequentialLR", commands=tmp_path / "steered" / "commands.jsonl")
    found = values(again)

    assert found == expected
    assert_same(parts(again), parts(steered))
