"""An error in training says which checkpoint to go on from."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.hooks import CheckpointHook
from tests.support.saving import Writes

Make = Callable[..., Trainer]


def notes_of(trainer: Trainer, *, at: int) -> list[str]:
    """The notes of an error in an iteration."""
    trainer.bus.subscribe(lambda event: 1 / 0, "before_train_iter", start=at - 1, once=True, name="fails")
    with pytest.raises(ZeroDivisionError) as failed:
        trainer.train()
    return [note for note in failed.value.__notes__ if "resume" in note]


def test_the_newest_checkpoint(make_trainer: Make, tmp_path: Path) -> None:
    """It is named with its iteration, and can be resumed from."""
    trainer = make_trainer(batches=3, max_epochs=3, hooks=[CheckpointHook(interval=1)])

    notes = notes_of(trainer, at=8)

    path = tmp_path / "run" / "epoch_2"
    assert notes == [f"the newest checkpoint to resume from is {path} (iteration 6)"]
    resumed = make_trainer(batches=3, max_epochs=3, hooks=[CheckpointHook(interval=1)])
    assert (resumed.resume(path), resumed.iter) == (path, 6)


def test_the_regular_one_of_an_iteration_is_named(make_trainer: Make, scripted: Any, tmp_path: Path) -> None:
    """Not the best one saved after it: `resume("auto")` takes the regular one, before and after the next save."""

    def make() -> Trainer:
        regular = CheckpointHook(interval=1, out_dir=str(tmp_path / "archive"))
        best = CheckpointHook(interval=-1, save_best="acc")
        return make_trainer(batches=3, max_epochs=3, hooks=[regular, best], **scripted(0.5))

    notes = notes_of(make(), at=5)
    resumed = make()

    path = resumed.resume("auto")

    assert path == tmp_path / "archive" / "run" / "epoch_1"
    assert notes == [f"the newest checkpoint to resume from is {path} (iteration 3)"]
    assert notes_of(resumed, at=4) == notes


def test_none_was_saved(make_trainer: Make, tmp_path: Path) -> None:
    """That is said too."""
    notes = notes_of(make_trainer(hooks=[CheckpointHook(interval=1)]), at=2)

    assert notes == [
        f"there is no checkpoint to resume from in {tmp_path / 'run'}: none was saved before this error"
    ]


def test_one_that_could_not_be_saved_is_not_named(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts is what became durable."""

    def nearly_full(path: Path) -> None:
        if path.name == "epoch_2":
            raise OSError(errno.ENOSPC, "No space left on device")

    Writes.of_hooks(monkeypatch, nearly_full)
    trainer = make_trainer(batches=3, max_epochs=3, hooks=[CheckpointHook(interval=1)])

    notes = notes_of(trainer, at=8)

    assert notes == [f"the newest checkpoint to resume from is {tmp_path / 'run' / 'epoch_1'} (iteration 3)"]


@pytest.mark.parametrize(
    "hooks", [[], [CheckpointHook(interval=1, save_optimizer=False)]], ids=["no hook", "weights only"]
)
def test_nothing_to_resume_from_is_promised(make_trainer: Make, hooks: list[Any]) -> None:
    """Where no hook saves, or what it saves cannot be resumed from, nothing is said."""
    trainer = make_trainer(hooks=hooks)
    trainer.bus.subscribe(lambda event: 1 / 0, "after_train_iter", start=1, name="fails")

    with pytest.raises(ZeroDivisionError) as failed:
        trainer.train()

    assert not any("resume" in note for note in failed.value.__notes__)
