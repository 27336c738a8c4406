"""Test that `trainer.save_checkpoint()` saves at the boundary at which it is called."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.checkpoint import load_checkpoint
from eventloop.hooks import CheckpointHook
from tests.steering.job import EPOCHS, PER_EPOCH, build, collected, steer, weights
from tests.support.trainers import batches


def saved(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a directory."""
    return sorted(path.name for path in folder.glob("*_*") if path.is_dir())


def alone(**options: Any) -> list[CheckpointHook]:
    """Return a hook that saves on request only."""
    return [CheckpointHook(save_last=False, **options)]


EVENTS = [
    ("before_train", 0, "iter_1"),
    ("before_train_epoch", 0, "iter_1"),
    ("before_train_iter", 5, "iter_6"),
    ("after_backward", 5, "iter_6"),
    ("after_train_iter", 5, "iter_6"),
    ("after_train_iter", 7, "iter_8"),
    ("after_train_epoch", 8, "epoch_2"),
    ("after_val_epoch", 8, "epoch_2"),
    ("after_val", 8, "epoch_2"),
]


@pytest.mark.parametrize(("event", "at", "name"), EVENTS)
def test_in_a_handler(tmp_path: Path, event: str, at: int, name: str) -> None:
    """The checkpoint has the weights of the boundary: the end of the iteration, else the place before the next."""
    trainer, seen = build(tmp_path / "run", hooks=alone()), dict[str, Any]()

    def save(event: Any) -> None:
        if event.iter == at:
            trainer.save_checkpoint()

    def store(event: Any) -> None:
        seen["weights"] = {key: value.clone() for key, value in trainer.model.state_dict().items()}

    trainer.bus.subscribe(save, event)
    trainer.bus.subscribe(store, "command_applied")
    trainer.train()
    trainer.close()

    assert saved(tmp_path / "run") == [name]
    state = load_checkpoint(tmp_path / "run" / name)
    assert state["meta"]["iter"] == max(at, int(name.partition("_")[2]) if name.startswith("iter") else at)
    assert all(torch.equal(state["state_dict"][key], value) for key, value in seen["weights"].items())


@pytest.mark.parametrize(("event", "at", "name"), EVENTS[::2])
def test_a_run_goes_on_from_it(tmp_path: Path, event: str, at: int, name: str) -> None:
    """A run that resumes from the checkpoint ends bitwise as the one that saved it."""
    whole = build(tmp_path / "run", hooks=alone())
    whole.bus.subscribe(lambda each: whole.save_checkpoint() if each.iter == at else None, event)
    whole.train()
    whole.close()

    then = build(tmp_path / "run", hooks=alone())
    then.resume(name)
    then.train()
    then.close()

    assert weights(then) == weights(whole)


def test_by_iteration(tmp_path: Path) -> None:
    """In a run measured in iterations a handler of a validation saves before the next iteration."""
    trainer = build(tmp_path / "run", hooks=alone(), by_epoch=False)
    trainer.bus.subscribe(
        lambda event: trainer.save_checkpoint() if event.iter == 8 else None, "after_val_epoch"
    )
    trainer.train()
    trainer.close()

    assert saved(tmp_path / "run") == ["iter_8"]
    assert load_checkpoint(tmp_path / "run" / "iter_8")["meta"]["position"]["evaluated"] == 1


def test_several_calls_save_once(tmp_path: Path) -> None:
    """Two calls in an iteration, and one in an iteration that the interval saves, make one checkpoint each."""
    trainer = build(tmp_path / "run")  # every five
    saves = collected(trainer, "checkpoint_saved")

    def save(event: Any) -> None:
        if event.iter in (4, 6):
            trainer.save_checkpoint()
            trainer.save_checkpoint()

    trainer.bus.subscribe(save, "after_train_iter")
    trainer.train()
    trainer.close()

    assert [Path(each.path).name for each in saves] == ["iter_5", "iter_7", "iter_10", "iter_12"]


def test_in_a_hand_written_loop(tmp_path: Path) -> None:
    """The body of a loop saves the iteration that it is in; between two epochs it saves at once."""
    trainer = build(tmp_path / "run", hooks=alone(), loss_fn=None)
    for epoch in trainer.epochs():
        for inputs, target in trainer.batches(batches(PER_EPOCH)):
            loss = torch.nn.functional.cross_entropy(trainer.model(inputs), target)
            trainer.outputs = {"loss": loss}
            if trainer.iter == 5:
                trainer.save_checkpoint()
        if epoch == 0:
            trainer.save_checkpoint()
    trainer.close()

    assert saved(tmp_path / "run") == ["epoch_1", "iter_6"]


def test_in_a_loop_of_steps(tmp_path: Path) -> None:
    """The end of the iteration saves."""
    trainer = build(tmp_path / "run", hooks=alone(), loss_fn=None)
    trainer.begin_run()
    for _ in range(EPOCHS):
        trainer.begin_epoch(PER_EPOCH)
        for inputs, target in batches(PER_EPOCH):
            if trainer.begin_iter((inputs, target)):
                if trainer.iter == 5:
                    trainer.save_checkpoint()
                trainer.end_iter({"loss": torch.nn.functional.cross_entropy(trainer.model(inputs), target)})
        trainer.end_epoch()
    trainer.end_run()
    trainer.close()

    assert saved(tmp_path / "run") == ["iter_6"]


def test_of_several_hooks_the_first_that_can_be_resumed_from(tmp_path: Path) -> None:
    """A hook that leaves out the optimizer is not asked."""
    hooks = [
        CheckpointHook(save_last=False, out_dir=tmp_path / name, save_optimizer=name != "weights")
        for name in ("weights", "whole", "more")
    ]
    for number, hook in enumerate(hooks):
        hook.name = f"saves{number}"
    trainer = build(tmp_path / "run", hooks=hooks)
    trainer.bus.subscribe(
        lambda event: trainer.save_checkpoint() if event.iter == 5 else None, "after_train_iter"
    )
    trainer.train()
    trainer.close()

    assert [saved(tmp_path / name / "run") for name in ("weights", "whole", "more")] == [[], ["iter_6"], []]


def test_a_command_after_it_does_not_change_it(tmp_path: Path) -> None:
    """The copy of the weights is complete before the next command of the same boundary changes them."""
    trainer, seen = build(tmp_path / "run", hooks=alone()), dict[str, Any]()

    def store(event: Any) -> None:
        if event.command == "note":
            seen["weights"] = {key: value.clone() for key, value in trainer.model.state_dict().items()}

    trainer.bus.subscribe(store, "command_applied")
    steer(trainer, {6: [("note", "now"), ("checkpoint",), ("shake", "5.0")]})
    trainer.train()
    trainer.close()

    state = load_checkpoint(tmp_path / "run" / "iter_6")["state_dict"]
    assert all(torch.equal(state[key], value) for key, value in seen["weights"].items())


def test_without_a_hook_that_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says, once, that nothing is saved; the run goes on."""
    trainer = build(
        tmp_path / "run", hooks=[], default_hooks={"checkpoint": None, "garbage_collection": None}
    )
    trainer.bus.subscribe(lambda event: trainer.save_checkpoint(), "after_train_iter")

    with caplog.at_level(logging.WARNING, "eventloop"):
        trainer.train()
    trainer.close()

    text = "checkpoint was refused: the run has no CheckpointHook whose checkpoints can be resumed from"
    assert [record.message for record in caplog.records if "refused" in record.message] == [text]
    assert trainer.iter == 12


def test_in_a_fast_dev_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A trial run saves nothing, and says so."""
    trainer = build(tmp_path / "run", fast_dev_run=True)
    trainer.bus.subscribe(lambda event: trainer.save_checkpoint(), "after_train_iter")

    with caplog.at_level(logging.WARNING, "eventloop"):
        trainer.train()
    trainer.close()

    assert "checkpoint was refused: a fast_dev_run saves no checkpoint" in caplog.text


def test_after_the_last_boundary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A request in a handler of the training's end comes too late, and the log says so."""
    trainer = build(tmp_path / "run", hooks=alone())
    trainer.bus.subscribe(lambda event: trainer.save_checkpoint(), "after_train")

    with caplog.at_level(logging.WARNING, "eventloop"):
        trainer.train()
    trainer.close()

    assert "checkpoint was refused: the run has ended" in caplog.text


def outside(trainer: Trainer) -> None:
    """Call it where no training runs."""
    trainer.save_checkpoint()


def in_an_evaluation(trainer: Trainer) -> None:
    """Call it in a run that only evaluates."""
    trainer.bus.subscribe(lambda event: trainer.save_checkpoint(), "after_val_epoch")
    trainer.val()


@pytest.mark.parametrize("call", [outside, in_an_evaluation])
def test_outside_a_training(tmp_path: Path, call: Any) -> None:
    """There is no iteration whose end would save, so the call is an error that says where it belongs."""
    trainer = build(tmp_path / "run")

    with pytest.raises(
        RuntimeError, match=r"expected a training that runs, got the request 'checkpoint' .* in a handler"
    ):
        call(trainer)
    trainer.close()


def test_a_path_as_in_other_trainers(tmp_path: Path) -> None:
    """Lightning's and MMEngine's methods take a path; the error says where that is given here."""
    trainer = build(tmp_path / "run")
    save: Any = trainer.save_checkpoint

    with pytest.raises(
        TypeError, match=r"save_checkpoint takes no argument .*got str: CheckpointHook\(out_dir=.*torch.save"
    ):
        save("model.ckpt")
    with pytest.raises(
        TypeError, match=r"save_checkpoint has no argument 'filepath': CheckpointHook\(out_dir="
    ):
        save(filepath="model.ckpt")
    trainer.close()
