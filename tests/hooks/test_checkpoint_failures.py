"""CheckpointHook: saves that fail."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop.checkpoint import load_checkpoint
from eventloop.events import CheckpointFailed
from eventloop.hooks import CheckpointHook
from eventloop.training.trainer import Trainer
from tests.support.saving import Writes

Make = Callable[..., Trainer]
Scripted = Callable[..., dict[str, Any]]
Files = Callable[..., list[str]]


@pytest.fixture
def fail_on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the saves of these names fail as on a full disk."""

    def fail(*names: str) -> None:
        def full(path: Path) -> None:
            if path.name in names:
                raise OSError(errno.ENOSPC, "No space left on device")

        Writes.of_hooks(monkeypatch, full)

    return fail


def test_failed_save_is_announced(make_trainer: Make, fail_on: Callable[..., None], tmp_path: Path) -> None:
    """`checkpoint_failed` names the path and the error."""
    fail_on("epoch_2")
    trainer = make_trainer(max_epochs=3, hooks=[CheckpointHook(interval=1)])

    with trainer.bus.capture("checkpoint_failed") as seen:
        trainer.train()

    (failed,) = (event for event in seen if isinstance(event, CheckpointFailed))
    assert failed.path == str(tmp_path / "run" / "epoch_2")
    assert "No space left on device" in failed.error


def test_training_goes_on_and_the_next_save_works(
    make_trainer: Make, fail_on: Callable[..., None], files: Files
) -> None:
    """One failure costs one checkpoint; no half of it is left."""
    fail_on("epoch_2")
    trainer = make_trainer(max_epochs=3, hooks=[CheckpointHook(interval=1)])

    trainer.train()

    assert trainer.epoch == 3
    assert files() == ["epoch_1", "epoch_3"]


def test_failed_save_is_logged_once_with_its_traceback(
    make_trainer: Make, fail_on: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Who listens to no event still reads of it."""
    fail_on("epoch_1")

    make_trainer(max_epochs=2, hooks=[CheckpointHook(interval=1)]).train()

    (record,) = (r for r in caplog.records if r.levelno >= logging.ERROR)
    assert "epoch_1 was not saved; older ones are intact" in record.getMessage()
    assert record.exc_info is not None


def test_failed_save_removes_nothing_older(
    make_trainer: Make, fail_on: Callable[..., None], files: Files, tmp_path: Path
) -> None:
    """With one checkpoint to keep, the one before stays until a later one is durable."""
    fail_on("epoch_2", "epoch_3")

    make_trainer(max_epochs=3, hooks=[CheckpointHook(interval=1, max_keep_ckpts=1)]).train()

    assert files() == ["epoch_1"]
    assert load_checkpoint(tmp_path / "run" / "epoch_1")["meta"]["epoch"] == 1


def test_pruning_goes_on_after_a_failure(
    make_trainer: Make, fail_on: Callable[..., None], files: Files
) -> None:
    """The next durable one replaces what the failed one could not."""
    fail_on("epoch_2")

    make_trainer(max_epochs=3, hooks=[CheckpointHook(interval=1, max_keep_ckpts=1)]).train()

    assert files() == ["epoch_3"]


def test_failed_save_under_a_taken_name_still_counts_the_older(
    make_trainer: Make, fail_on: Callable[..., None], files: Files
) -> None:
    """One that was kept, and could not be replaced by one of its name, is pruned in its turn."""
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
    """The last epoch's checkpoint, when it failed at its interval, is saved by `save_last`."""
    writes: list[str] = []

    def first_fails(path: Path) -> None:
        writes.append(path.name)
        if writes.count(path.name) == 1 and path.name == "epoch_2":
            raise OSError(errno.ENOSPC, "No space left on device")

    Writes.of_hooks(monkeypatch, first_fails)
    make_trainer(max_epochs=2, hooks=[CheckpointHook(interval=1)]).train()

    assert writes == ["epoch_1", "epoch_2", "epoch_2"]
    assert files() == ["epoch_1", "epoch_2"]


def test_failed_best_keeps_the_old_best(
    make_trainer: Make, fail_on: Callable[..., None], files: Files, scripted: Scripted
) -> None:
    """File and score stay those of the old best, so that a later score is compared with what is there."""
    fail_on("best_acc_epoch_2")
    hook = CheckpointHook(save_best="acc", save_last=False)

    make_trainer(max_epochs=3, hooks=[hook], **scripted(0.25, 0.75, 0.125)).train()

    assert files() == ["best_acc_epoch_1"]
    assert hook.best.score == 0.25


def test_score_is_not_compared_with_a_best_that_failed(
    make_trainer: Make, fail_on: Callable[..., None], files: Files, scripted: Scripted
) -> None:
    """A best is waited for in its validation: one that fails does not outrank the next score."""
    fail_on("best_acc_epoch_2")
    hook = CheckpointHook(save_best="acc", save_last=False)
    make_trainer(max_epochs=3, hooks=[hook], **scripted(0.25, 0.75, 0.5)).train()

    assert files() == ["best_acc_epoch_3"]
    assert hook.best.score == 0.5


def test_directory_that_cannot_be_made_is_a_failed_save(
    make_trainer: Make, tmp_path: Path, record_names: Callable[..., list[str]]
) -> None:
    """An `out_dir` that is a file is reported at each save, and training goes on."""
    (tmp_path / "far").write_text("a file")
    trainer = make_trainer(max_epochs=2, hooks=[CheckpointHook(interval=1, out_dir=tmp_path / "far")])
    seen = record_names(trainer, "checkpoint_failed", "checkpoint_saved")

    trainer.train()

    assert set(seen) == {"checkpoint_failed"}
    assert trainer.epoch == 2
