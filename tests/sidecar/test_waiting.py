"""Test that checkpoints that wait for their validation stay, and marks where things are not as usual."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.checkpoint import load_checkpoint, read_manifest, save_checkpoint, verify_checkpoint
from eventloop.checkpoint.commit import commit
from eventloop.checkpoint.manifest import Label
from eventloop.checkpoint.saving.mark import Mark
from eventloop.evaluation.schedule import Never
from eventloop.hooks import AsyncValidationHook, CheckpointHook
from tests.sidecar.jobs import report
from tests.support.trainers import MakeTrainer, batches


def waiting(make_trainer: MakeTrainer, limit: int = 20, **changes: Any) -> Trainer:
    """A training whose checkpoints an evaluator elsewhere validates."""
    return make_trainer(
        train_loader=batches(1),
        val_loader=batches(1),
        max_epochs=changes.pop("max_epochs", 6),
        hooks=[CheckpointHook(1, max_keep_ckpts=2), AsyncValidationHook(None, wait=0, max_waiting=limit)],
        **changes,
    )


def kept(trainer: Trainer) -> list[int]:
    """The epochs of the regular checkpoints that are there."""
    return sorted(
        int(path.parent.name.rpartition("_")[2]) for path in trainer.work_dir.glob("epoch_*/manifest.json")
    )


def test_a_checkpoint_that_waits_stays(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    """Checkpoints beyond `max_keep_ckpts` stay until their metrics come, and those that nobody validates stay."""
    trainer = waiting(make_trainer)
    there: list[list[int]] = []

    def handle(trainer: Trainer, event: Any) -> None:
        if event.iter == 3:
            trainer.state.finish_saves()
            there.append(kept(trainer))
            report(trainer, "epoch_2", loss=0.5)

    trainer.bus.subscribe(handle, "after_train_iter", priority="LOWEST", name="handle")
    trainer.train()

    assert there == [[1, 2, 3]]
    assert kept(trainer) == [3, 4, 5, 6]
    assert "4 checkpoints of" in caplog.text
    assert "are not validated: `eventloop evaluate` validates them" in caplog.text


def test_those_that_wait_are_bounded(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    """At most `max_waiting` checkpoints wait, the newest ones; the log has one warning."""
    trainer = waiting(make_trainer, limit=3)
    trainer.train()

    assert kept(trainer) == [4, 5, 6]
    assert caplog.text.count("may be removed before it is validated") == 1
    assert "epoch_1 may be removed before it is validated, because 3 newer checkpoints wait" in caplog.text


def test_those_of_a_resumed_run_wait_again(make_trainer: MakeTrainer) -> None:
    """A resumed run retains the checkpoints that were not validated before it."""
    first = waiting(make_trainer, max_epochs=3)
    first.train()
    first.close()
    second = waiting(make_trainer, max_epochs=5)
    second.resume()
    second.train()

    assert kept(second) == [1, 2, 3, 4, 5]


def test_what_was_retained_too_long_is_removed_at_the_end(make_trainer: MakeTrainer) -> None:
    """Checkpoints beyond `max_keep_ckpts` whose metrics come at the end of the run are removed then."""
    trainer = make_trainer(
        train_loader=batches(1),
        val_loader=batches(1),
        max_epochs=4,
        hooks=[CheckpointHook(1, max_keep_ckpts=2), AsyncValidationHook(None, wait=60)],
    )

    def handle(trainer: Trainer, event: Any) -> None:
        report(trainer, "epoch_4", loss=0.5)

    trainer.bus.subscribe(handle, "after_train", priority=95, name="handle")  # between the save and the wait
    trainer.train()

    assert kept(trainer) == [3, 4]


# --- marks -------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of iteration 3."""
    state = {"meta": {"iter": 3, "epoch": 1}, "state_dict": {"weight": torch.arange(4.0)}}
    save_checkpoint(state, tmp_path / "epoch_1", Label(sequence=7))
    return tmp_path / "epoch_1"


def mark_of(source: Path, iteration: int = 3) -> Mark:
    """A mark of a checkpoint as the best one."""
    fields = {"best": {"acc": "greater"}, "keep_best": 1, "metrics": {"acc": 0.5}, "validated_at": iteration}
    return Mark(source.with_name("best_acc_epoch_1"), source, iteration, fields)


def test_a_mark_is_a_whole_checkpoint(source: Path) -> None:
    """A marked checkpoint passes the verification, and has the label of a best one."""
    mark = mark_of(source)
    (outcome,) = commit([mark])

    assert outcome.error is None
    manifest = verify_checkpoint(mark.path)
    assert (manifest.best, manifest.sequence, manifest.iter) == ({"acc": "greater"}, 7, 3)
    assert outcome.bytes == manifest.files["state.pth"].bytes


def test_files_are_copied_where_they_cannot_be_linked(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without hard links the bytes are copied, and compared with the manifest."""

    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", link)
    mark = mark_of(source)
    (outcome,) = commit([mark])

    assert outcome.error is None
    verify_checkpoint(mark.path)
    assert not (mark.path / "state.pth").samefile(source / "state.pth")
    assert load_checkpoint(mark.path)["state_dict"]["weight"].tolist() == [0, 1, 2, 3]

    data = bytearray((source / "state.pth").read_bytes())
    data[-1] ^= 1
    (source / "state.pth").write_bytes(data)
    (outcome,) = commit([mark])
    assert "is damaged: it is not what was saved" in str(outcome.error)
    verify_checkpoint(mark.path)


def test_a_mark_of_a_replaced_checkpoint_fails(source: Path) -> None:
    """A checkpoint of the name that is of another iteration is not marked."""
    (outcome,) = commit([mark_of(source, iteration=2)])

    assert f"expected the checkpoint of iteration 2 at {source}, got the one of iteration 3" in str(
        outcome.error
    )
    assert sorted(path.name for path in source.parent.iterdir()) == ["epoch_1"]


def test_a_mark_may_be_repeated_without_its_source(source: Path) -> None:
    """A mark that was made before is not made again; without it and its source it fails."""
    mark = mark_of(source)
    commit([mark])
    before = (mark.path / "manifest.json").stat().st_mtime_ns
    source.rename(source.with_name(".away"))
    (outcome,) = commit([mark])
    assert outcome.error is None
    assert (mark.path / "manifest.json").stat().st_mtime_ns == before

    mark.path.rename(source.with_name(".away-too"))
    (outcome,) = commit([mark])
    assert isinstance(outcome.error, FileNotFoundError)


def test_a_mark_that_fails_is_no_best_score(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """If a checkpoint cannot be marked, the former best one counts again, and the training goes on."""
    hook = CheckpointHook(1, save_best="acc")
    trainer = make_trainer(
        train_loader=batches(1),
        val_loader=batches(1),
        max_epochs=5,
        hooks=[hook],
        val_step=lambda trainer, batch: {"acc": 0.0},
    )
    trainer.schedule = Never()

    def handle(trainer: Trainer, event: Any) -> None:
        if event.iter == 1:
            report(trainer, "epoch_1", acc=0.25)
        if event.iter == 2:
            report(trainer, "epoch_2", acc=0.5)
            (trainer.work_dir / "epoch_2").rename(trainer.work_dir / ".away")

    trainer.bus.subscribe(handle, "after_train_iter", priority="LOWEST", name="handle")
    trainer.train()

    assert (hook.best.score, hook.best.name) == (0.25, "best_acc_epoch_1")
    assert read_manifest(trainer.work_dir / "best_acc_epoch_1").metrics == {"acc": 0.25}
    assert "best_acc_epoch_2 was not saved; older ones are intact" in caplog.text
