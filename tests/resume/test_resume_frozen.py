"""Test that a resumed run trains the parameters that the interrupted one trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError
from eventloop.hooks import EMAHook
from tests.checkpoints import rewrite
from tests.support.interrupted import assert_same, stop_after
from tests.support.trainers import MakeTrainer, tiny_model

Make = Callable[..., Trainer]


@pytest.fixture
def build(make_trainer: MakeTrainer, tmp_path: Path) -> Make:
    """Return a function that builds a trainer whose program freezes or unfreezes the first layer in epoch 1."""

    def make(
        frozen: bool = True, turns: bool = True, only: bool = False, grows: bool = False, **changes: Any
    ) -> Trainer:
        model = tiny_model()
        first: Any = model[0]  # type: ignore[index]
        first.requires_grad_(not frozen)
        parameters = [p for p in model.parameters() if p.requires_grad or not only]
        optimizer = torch.optim.Adam(parameters, 0.01)
        trainer = make_trainer(model=model, optimizer=optimizer, max_epochs=3, work_dir=tmp_path, **changes)

        @trainer.bus.on("before_train_epoch")
        def turn(trainer: Any, event: Any) -> None:
            if turns and event.epoch == 1:
                first.requires_grad_(frozen)
                if grows and trainer.batch_idx == 0:
                    optimizer.add_param_group({"params": [*first.parameters()]})

        return trainer

    return make


def interrupted(trainer: Trainer) -> None:
    """Train until the middle of the last epoch."""
    stop_after(trainer, 8)
    trainer.train()


@pytest.mark.parametrize("frozen", [True, False], ids=["unfrozen later", "frozen later"])
@pytest.mark.parametrize("hooks", [[], [EMAHook]], ids=["plain", "average"])
def test_bitwise_the_uninterrupted_run(build: Make, frozen: bool, hooks: list[Any]) -> None:
    """A layer that a handler unfreezes or freezes in epoch 1 goes on so after a resume in epoch 2."""
    whole = build(frozen, default_hooks={"checkpoint": None}, hooks=[hook() for hook in hooks])
    whole.train()
    interrupted(build(frozen, hooks=[hook() for hook in hooks]))

    trainer = build(frozen, hooks=[hook() for hook in hooks])
    trainer.resume()
    trainer.train()

    assert_same(trainer.model.state_dict(), whole.model.state_dict())
    flags = [[p.requires_grad for p in each.model.parameters()] for each in (trainer, whole)]
    assert flags[0] == flags[1] == [frozen, frozen, True, True]


def test_a_group_that_a_handler_adds(build: Make) -> None:
    """Its parameters are refused by name if the optimizer lacks them, and resumed bitwise if it has them."""
    whole = build(only=True, grows=True, default_hooks={"checkpoint": None})
    whole.train()
    interrupted(build(only=True, grows=True))
    trainer = build(only=True, grows=True)

    with pytest.raises(
        CheckpointError,
        match=r"parameters of the optimizer: \['0\.weight', '0\.bias'\] in the checkpoint, \[\] in this",
    ):
        trainer.resume()
    trainer.optimizer.add_param_group({"params": [*trainer.model[0].parameters()]})  # type: ignore[index]
    trainer.resume()
    trainer.train()

    assert_same(trainer.model.state_dict(), whole.model.state_dict())


@pytest.mark.parametrize(("changed", "trains"), [("keep", [True] * 4), ("apply", [False, False, True, True])])
def test_a_script_that_freezes_others(
    build: Make, caplog: pytest.LogCaptureFixture, changed: Any, trains: list[bool]
) -> None:
    """What the script itself has frozen since is refused by name, and decided by `changed`."""
    interrupted(build(False, turns=False))
    trainer = build(True, turns=False)
    line = r"frozen parameters: \[\] in the checkpoint, \['0\.weight', '0\.bias'\] in this trainer"

    with pytest.raises(CheckpointError, match=line):
        trainer.resume()
    assert [p.requires_grad for p in trainer.model.parameters()] == [False, False, True, True]
    trainer.resume(changed=changed)

    assert [p.requires_grad for p in trainer.model.parameters()] == trains
    assert "frozen parameters: [] in the checkpoint" in caplog.text
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.train()
    moved = [not torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True)]
    assert moved == trains


def test_the_settings_that_were_kept_are_saved(build: Make) -> None:
    """A run that goes on with the checkpoint's frozen parameters is resumed by the first script again."""
    interrupted(build(False, turns=False))
    trainer = build(True, turns=False)
    trainer.resume(changed="keep")
    trainer.train()

    assert build(False, turns=False).resume().name == "epoch_3"


def test_weights_alone_and_older_checkpoints(build: Make, tmp_path: Path) -> None:
    """Without the checkpoint's word, and for weights alone, each parameter stays as the script has it."""
    interrupted(build(True))
    path = tmp_path / "iter_8"
    trainer = build(True)

    trainer.load_checkpoint(path)
    loaded = [p.requires_grad for p in trainer.model.parameters()]

    def forget(checkpoint: dict[str, Any]) -> None:
        del checkpoint["meta"]["frozen"], checkpoint["meta"]["settings"]["frozen"]

    rewrite(path, forget)
    trainer.resume(path)

    assert loaded == [p.requires_grad for p in trainer.model.parameters()] == [False, False, True, True]
