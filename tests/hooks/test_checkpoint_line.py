"""Test runs that go back to an earlier checkpoint, and end before their first save."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.checkpoint import load_newest
from eventloop.checkpoint.directory import LINE
from eventloop.hooks import CheckpointHook
from tests.support.internals import substitute

Make = Callable[..., Trainer]
Scripted = Callable[..., dict[str, Any]]


class Killed(BaseException):
    """An exception that ends a run without a save, like a kill."""


@pytest.fixture
def run(make_trainer: Make, scripted: Scripted) -> Callable[..., Trainer]:
    """Return a function that builds a trainer of five epochs, of which the second is the best."""

    def make(max_epochs: int = 5, **hook: Any) -> Trainer:
        scores = scripted(0.1, 0.9, *[0.2] * 20)
        hook = {"interval": 1, "save_best": "acc", **hook}
        return make_trainer(max_epochs=max_epochs, hooks=[CheckpointHook(**hook)], **scores)

    return make


Run = Callable[..., Trainer]


def killed(trainer: Trainer) -> None:
    """Train, and end the run in its first iteration without a save."""

    def kill(event: Any) -> None:
        raise Killed

    trainer.bus.subscribe(kill, "after_train_iter")
    with pytest.raises(Killed):
        trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["best", "epoch_2.pth"])
def test_auto_follows_the_run(run: Run, tmp_path: Path, chosen: str) -> None:
    """After a kill before the first save, `resume("auto")` goes on from the checkpoint that the killed run
    resumed from."""
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
    """A resume without training, as for an export, records no step back."""
    run().train()
    run(6).resume("best")

    assert not (tmp_path / "run" / LINE).exists()
    assert load_newest(tmp_path / "run")[0].name == "epoch_5"


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "chosen"), [(5, "epoch_5"), (2, "best")])
def test_going_on_from_the_newest_writes_nothing(run: Run, tmp_path: Path, epochs: int, chosen: str) -> None:
    """Going on from the newest checkpoint records no step back, also if it was chosen as the best."""
    run(epochs).train()
    second = run(6)
    second.resume(chosen if chosen in ("auto", "best") else tmp_path / "run" / chosen)
    killed(second)

    assert not (tmp_path / "run" / LINE).exists()


def test_one_of_another_directory(run: Run, tmp_path: Path) -> None:
    """Going on from a checkpoint of another directory records no step back."""
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
    """If the step back cannot be recorded, the run goes on, and a warning says what it would cost."""
    run().train()
    second = run(6)
    second.resume("best")

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    substitute(monkeypatch, "directory.write_steps_back", full)
    second.train()

    assert (
        f"could not record in {tmp_path / 'run'} that the run goes on from best_acc_epoch_2; until it has saved, "
        'resume("auto") would take epoch_5: [Errno 28] No space left on device'
    ) in caplog.text
    assert second.epoch == 6
