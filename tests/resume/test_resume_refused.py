"""Test checkpoints that cannot be resumed from: the error names the reason, and nothing changes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError, load_checkpoint
from eventloop.checkpoint.commit import PAYLOAD
from eventloop.hooks import Hook
from tests.checkpoints import rewrite
from tests.support.interrupted import assert_same
from tests.support.trainers import MakeTrainer, tiny_model


@pytest.fixture
def saved(make_trainer: MakeTrainer, tmp_path: Path) -> Path:
    """Return the directory of a finished run of two epochs."""
    make_trainer(work_dir=tmp_path / "run").train()
    return tmp_path / "run"


def live_state(trainer: Trainer) -> Any:
    """Return the state that a refused checkpoint must leave unchanged."""
    return copy.deepcopy((trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.iter))


def refuse(trainer: Trainer, path: Path | str, message: str) -> None:
    """Assert that a resume is refused, and leaves everything unchanged."""
    before = live_state(trainer)
    with pytest.raises(CheckpointError, match=message):
        trainer.resume(path)
    assert_same(live_state(trainer), before)


def test_plain_torch_load_reads_it(saved: Path) -> None:
    """`torch.load(weights_only=True)` reads a checkpoint, and its weights fit the plain model."""
    checkpoint = torch.load(saved / "epoch_2" / PAYLOAD, weights_only=True)
    model = tiny_model()

    model.load_state_dict(checkpoint["state_dict"])

    assert checkpoint.keys() == {"meta", "state_dict", "optimizer", "param_schedulers", "hooks", "rng"}
    assert (checkpoint["meta"]["iter"], checkpoint["meta"]["epoch"]) == (6, 2)


def test_checkpoint_of_another_model(make_trainer: MakeTrainer, saved: Path) -> None:
    """Every parameter that does not fit is named with both shapes."""
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 5), nn.Linear(5, 3))
    trainer = make_trainer(model=model, work_dir=saved / "other")
    lines = [
        r"epoch_2 does not fit the model; nothing was loaded:",
        r"  3.weight: the checkpoint has \(3, 8\), the model \(5, 8\)",
        r"  3.bias: the checkpoint has \(3,\), the model \(5,\)",
        r"  4.weight: \(3, 5\) in the model, not in the checkpoint",
        r"  4.bias: \(3,\) in the model, not in the checkpoint",
    ]

    refuse(trainer, saved / "epoch_2", "\n".join(lines))


def test_auto_passes_over_a_damaged_one(
    make_trainer: MakeTrainer, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`resume("auto")` takes the newest intact checkpoint, and logs what is wrong with newer ones."""
    payload = saved / "epoch_2" / PAYLOAD
    payload.write_bytes(payload.read_bytes()[:1000])
    trainer = make_trainer(work_dir=saved)

    found = trainer.resume("auto")

    assert found == saved / "epoch_1"
    assert trainer.epoch == 1
    assert f"passed over for {found}: {payload} is damaged: it has 1000 bytes" in caplog.text


def by_parameter(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with a param group for each parameter."""
    return torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("arguments", "optimizer", "message"),
    [
        (
            {"max_epochs": None, "max_iters": 9},
            None,
            "of a run measured in epochs, this trainer counts iterations",
        ),
        (
            {},
            lambda model: torch.optim.Adam(model.parameters()),
            "is of another optimizer: SGD, the trainer has Adam",
        ),
        ({}, by_parameter, r"parameter groups have \[4\] parameters, the trainer's \[1, 1, 1, 1\]"),
        (
            {"schedulers": [{"type": "ConstantLR"}]},
            None,
            r"the state of the schedulers \[\], the trainer has \['ConstantLR'\]",
        ),
    ],
    ids=["unit", "optimizer", "groups", "schedulers"],
)
def test_checkpoint_of_another_run(
    make_trainer: MakeTrainer, saved: Path, arguments: dict[str, Any], optimizer: Any, message: str
) -> None:
    """A run with another unit, optimizer or schedulers is refused before its weights are loaded."""
    model = tiny_model()
    made = {} if optimizer is None else {"optimizer": optimizer(model)}

    refuse(
        make_trainer(work_dir=saved / "other", model=model, **arguments, **made), saved / "epoch_2", message
    )


@pytest.mark.parametrize("which", ["epoch_2", "auto"])
def test_checkpoint_of_a_later_version(make_trainer: MakeTrainer, saved: Path, which: str) -> None:
    """A checkpoint of an unknown version is refused, also by "auto", which takes no older one instead."""
    rewrite(saved / "epoch_2", lambda checkpoint: checkpoint["meta"].update(schema=99))

    refuse(make_trainer(work_dir=saved), which, "has schema 99, this version of eventloop reads 2")


def test_states_of_hooks_that_do_not_match(
    make_trainer: MakeTrainer, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names states without a hook, and hooks without a state."""

    class New(Hook):
        def state_dict(self) -> dict[str, Any]:
            return {}

    rewrite(saved / "epoch_2", lambda checkpoint: checkpoint["hooks"].update(EMAHook={}))
    trainer = make_trainer(work_dir=saved, hooks=[New()])

    with caplog.at_level(logging.WARNING, "eventloop"):
        trainer.resume()

    assert "has a state of EMAHook, but this trainer has no such hook" in caplog.text
    assert "has no state of the hook New, which starts afresh" in caplog.text


def test_a_hook_that_saves_a_state_and_loads_none(
    make_trainer: MakeTrainer, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log of a resume says so of its state; not of an empty state, or of a hook that also calls the base class."""

    class Saves(Hook):
        def state_dict(self) -> dict[str, Any]:
            return {}

    class Empty(Saves): ...

    class Loads(Saves):
        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            super().load_state_dict(state)

    states = {"Saves": {"n": 1}, "Empty": {}, "Loads": {"n": 1}}
    rewrite(saved / "epoch_2", lambda checkpoint: checkpoint["hooks"].update(states))

    with caplog.at_level(logging.WARNING, "eventloop"):
        make_trainer(work_dir=saved, hooks=[Saves(), Empty(), Loads()]).resume()

    told = [record.getMessage() for record in caplog.records if "no load_state_dict" in record.getMessage()]
    assert told == [
        "the hook Saves has a state_dict and no load_state_dict: its state of the checkpoint is not restored"
    ]


def test_handlers_may_change_what_was_read(make_trainer: MakeTrainer, saved: Path) -> None:
    """A handler of after_load_checkpoint may change `trainer.checkpoint` before anything is loaded."""
    trainer = make_trainer(work_dir=saved)
    before = live_state(trainer)[0]
    untouched: list[bool] = []

    @trainer.bus.on("after_load_checkpoint")
    def edit(trainer: Any, event: Any) -> None:
        now = trainer.model.state_dict()
        untouched.append(all(torch.equal(now[name], before[name]) for name in before))
        trainer.checkpoint["state_dict"]["0.bias"] = torch.full((8,), 3.0)

    trainer.resume()

    assert untouched == [True]
    assert trainer.model.state_dict()["0.bias"].tolist() == [3.0] * 8
    assert trainer.checkpoint is None


def test_handlers_may_change_what_is_saved(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A handler of before_save_checkpoint may change `trainer.checkpoint` before it is written."""
    trainer = make_trainer(max_epochs=1)

    @trainer.bus.on("before_save_checkpoint")
    def edit(trainer: Any, event: Any) -> None:
        trainer.checkpoint["note"] = event.path

    trainer.train()

    path = trainer.work_dir / "epoch_1"
    assert load_checkpoint(path)["note"] == str(path)
