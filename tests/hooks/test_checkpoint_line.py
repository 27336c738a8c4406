"""CheckpointHook: a run that went back to an earlier checkpoint, and ended before it saved."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop.checkpoint import load_newest
from eventloop.checkpoint.lineage import LINE
from eventloop.hooks import CheckpointHook
from eventloop.training.trainer import Trainer

Make = Callable[..., Trainer]
Scripted = Callable[..., dict[str, Any]]


class Killed(BaseException):
    """What a kill is like: nothing is saved."""


@pytest.fixture
def run(make_trainer: Make, scripted: Scripted) -> Callable[..., Trainer]:
    """A trainer of five epochs whose second was the best."""

    def make(max_epochs: int = 5, **hook: Any) -> Trainer:
        scores = scripted(0.1, 0.9, *[0.2] * 20)
        hook = {"interval": 1, "save_best": "acc", **hook}
        return make_trainer(max_epochs=max_epochs, hooks=[CheckpointHook(**hook)], **scores)

    return make


Run = Callable[..., Trainer]


def killed(trainer: Trainer) -> None:
    """Train, and be killed in the first iteration."""

    def kill(event: Any) -> None:
        raise Killed

    trainer.bus.subscribe(kill, "after_train_iter")
    with pytest.raises(Killed):
        trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["best", "epoch_2.pth"])
def test_auto_follows_the_run(run: Run, tmp_path: Path, chosen: str) -> None:
    """A run that was resumed from another checkpoint than the newest, and killed before its first save, is gone on
    with where it was resumed from: the regular checkpoint of that iteration."""
    work_dir = tmp_path / "run"
    run().train()
    second = run(6)
    second.resume(chosen if chosen == "best" else work_dir / chosen)
    killed(second)

    third = run(6)
    assert third.resume("auto") == work_dir / "epoch_2"
    third.train()
    assert load_newest(work_dir)[0].name == "epoch_6"
    assert third.epoch == 6


def test_a_resume_alone_leaves_nothing_behind(run: Run, tmp_path: Path) -> None:
    """Who goes back to test or to export a model has not gone on from it."""
    run().train()
    run(6).resume("best")

    assert not (tmp_path / "run" / LINE).exists()
    assert load_newest(tmp_path / "run")[0].name == "epoch_5"


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "chosen"), [(5, "epoch_5"), (2, "best")])
def test_going_on_from_the_newest_writes_nothing(run: Run, tmp_path: Path, epochs: int, chosen: str) -> None:
    """However it was chosen; also from the best one of the last iteration."""
    run(epochs).train()
    second = run(6)
    second.resume(chosen if chosen in ("auto", "best") else tmp_path / "run" / chosen)
    killed(second)

    assert not (tmp_path / "run" / LINE).exists()


def test_one_of_another_directory(run: Run, tmp_path: Path) -> None:
    """Is nothing that a line could go on from here."""
    run().train()
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "run" / "epoch_2").rename(elsewhere)
    second = run(6)
    second.resume(elsewhere)
    killed(second)

    assert not (tmp_path / "run" / LINE).exists()


def test_a_note_that_cannot_be_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Does not end the run; the log says what it will cost."""
    run().train()
    second = run(6)
    second.resume("best")

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("eventloop.checkpoint.directory.write_steps_back", full)
    second.train()

    assert (
        f"could not record in {tmp_path / 'run'} that the run goes on from best_acc_epoch_2; until it has saved, "
        'resume("auto") would take epoch_5: [Errno 28] No space left on device'
    ) in caplog.text
    assert second.epoch == 6
