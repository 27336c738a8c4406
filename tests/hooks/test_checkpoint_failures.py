"""Test saves of CheckpointHook that fail."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError, load_checkpoint
from eventloop.events import CheckpointFailed
from eventloop.hooks import CheckpointHook
from tests.support.saving import Ended, Writes

Make = Callable[..., Trainer]
Scripted = Callable[..., dict[str, Any]]
Files = Callable[..., list[str]]
Fail = Callable[..., None]


@pytest.fixture
def fail_on(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Return a function that lets the saves of some names fail like on a full disk."""

    def fail(*names: str) -> None:
        def full(path: Path) -> None:
            if path.name in names:
                raise OSError(errno.ENOSPC, "No space left on device")

        Writes.of_hooks(monkeypatch, full)

    return fail


def test_training_goes_on_and_the_next_save_works(
    make_trainer: Make, fail_on: Fail, files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed save is reported once by event and log, leaves no file, and the next save works."""
    fail_on("epoch_2")
    trainer = make_trainer(max_epochs=3, hooks=[CheckpointHook(interval=1)])

    with trainer.bus.capture("checkpoint_failed") as seen:
        trainer.train()

    assert trainer.epoch == 3
    assert files() == ["epoch_1", "epoch_3"]
    (failed,) = (event for event in seen if isinstance(event, CheckpointFailed))
    assert failed.path == str(tmp_path / "run" / "epoch_2")
    assert "No space left on device" in failed.error
    (record,) = (r for r in caplog.records if r.levelno >= logging.ERROR)
    assert "epoch_2 was not saved; older ones are intact" in record.getMessage()
    assert record.exc_info is not None


@pytest.mark.parametrize(("fails", "left"), [(["epoch_2", "epoch_3"], "epoch_1"), (["epoch_2"], "epoch_3")])
def test_failed_save_removes_nothing_older(
    make_trainer: Make, fail_on: Fail, files: Files, tmp_path: Path, fails: list[str], left: str
) -> None:
    """A failed save removes no older checkpoint."""
    fail_on(*fails)

    make_trainer(max_epochs=3, hooks=[CheckpointHook(interval=1, max_keep_ckpts=1)]).train()

    assert files() == [left]
    assert load_checkpoint(tmp_path / "run" / left)["meta"]["epoch"] == int(left[-1])


def test_failed_save_under_a_taken_name_still_counts_the_older(
    make_trainer: Make, fail_on: Fail, files: Files
) -> None:
    """If a save under an existing name fails, the former checkpoint of that name still counts for pruning."""
    make_trainer(batches=2, max_iters=4, hooks=[CheckpointHook(interval=2)]).train()
    hook = CheckpointHook(interval=2, max_keep_ckpts=1)
    resumed = make_trainer(batches=2, max_iters=6, hooks=[hook])
    resumed.resume()
    fail_on("iter_4")
    resumed.iter = 2  # a run that comes by iteration 4 once more

    resumed.train()

    assert files() == ["iter_6"]


def test_failed_epoch_save_is_tried_again_at_the_end(
    make_trainer: Make, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed checkpoint of the last epoch is saved again by `save_last`."""
    writes: list[str] = []

    def first_fails(path: Path) -> None:
        writes.append(path.name)
        if writes.count(path.name) == 1 and path.name == "epoch_2":
            raise OSError(errno.ENOSPC, "No space left on device")

    Writes.of_hooks(monkeypatch, first_fails)
    make_trainer(max_epochs=2, hooks=[CheckpointHook(interval=1)]).train()

    assert writes == ["epoch_1", "epoch_2", "epoch_2"]
    assert files() == ["epoch_1", "epoch_2"]


@pytest.mark.parametrize(("last", "best", "score"), [(0.125, 1, 0.25), (0.5, 3, 0.5)])
def test_score_is_not_compared_with_a_best_that_failed(
    make_trainer: Make, fail_on: Fail, files: Files, scripted: Scripted, last: float, best: int, score: float
) -> None:
    """Later scores are not compared with a best checkpoint whose save has failed."""
    fail_on("best_acc_epoch_2")
    hook = CheckpointHook(save_best="acc", save_last=False)

    make_trainer(max_epochs=3, hooks=[hook, Ended(hook)], **scripted(0.25, 0.75, last)).train()

    assert files() == [f"best_acc_epoch_{best}"]
    assert hook.best.score == score


def test_directory_that_cannot_be_made_is_a_failed_save(
    make_trainer: Make, tmp_path: Path, record_names: Callable[..., list[str]]
) -> None:
    """If `out_dir` cannot be made, each save fails with an event, training goes on, and ends with an error."""
    (tmp_path / "far").write_text("a file")
    trainer = make_trainer(max_epochs=2, hooks=[CheckpointHook(interval=1, out_dir=tmp_path / "far")])
    seen = record_names(trainer, "checkpoint_failed", "checkpoint_saved")

    with pytest.raises(
        CheckpointError,
        match=r"expected a checkpoint .*, got none: all 3 saves .*/far/run/epoch_2: FileExists",
    ):
        trainer.train()

    assert set(seen) == {"checkpoint_failed"}
    assert trainer.epoch == 2
