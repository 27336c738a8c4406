"""`trainer.resume("iter_50")`: a name alone is looked for where the run's checkpoints are."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from eventloop.checkpoint import CheckpointError
from eventloop.hooks import CheckpointHook
from tests.trainer.conftest import MakeTrainer


@pytest.fixture
def saved(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a finished run of two epochs, seen from elsewhere."""
    make_trainer(work_dir=tmp_path / "run").train()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["epoch_1", "epoch_1.pth"])
def test_in_the_work_dir(make_trainer: MakeTrainer, saved: Path, name: str) -> None:
    """By its name, also as MMEngine's file would have been called; weights alone too."""
    trainer = make_trainer(work_dir=saved)

    assert trainer.resume(name) == saved / "epoch_1"
    assert trainer.epoch == 1
    trainer.load_checkpoint(name)


def test_where_the_hook_saves(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """With `out_dir` that is not the work dir."""
    make_trainer(
        work_dir=tmp_path / "run", hooks=[CheckpointHook(interval=1, out_dir=tmp_path / "out")]
    ).train()
    other = make_trainer(
        work_dir=tmp_path / "run", hooks=[CheckpointHook(interval=1, out_dir=tmp_path / "out")]
    )

    assert other.resume("epoch_1") == tmp_path / "out" / "run" / "epoch_1"


def test_a_path_that_exists_comes_first(make_trainer: MakeTrainer, saved: Path) -> None:
    """What is there in the working directory is what was meant."""
    (saved / "epoch_2").rename("epoch_1")

    trainer = make_trainer(work_dir=saved)

    assert trainer.resume("epoch_1") == Path("epoch_1")
    assert trainer.epoch == 2


def test_a_name_that_is_nowhere(make_trainer: MakeTrainer, saved: Path, tmp_path: Path) -> None:
    """Is refused with both places, and a suggestion."""
    with pytest.raises(
        FileNotFoundError,
        match=r"no checkpoint at epoch_11, nor one of that name in .*run: did you mean 'epoch_1'\?",
    ):
        make_trainer(work_dir=saved).resume("epoch_11")
    with pytest.raises(
        FileNotFoundError, match=r"no checkpoint at epoch_1, nor .* in .*new, which holds none"
    ):
        make_trainer(work_dir=tmp_path / "new").resume("epoch_1")


def test_a_refusal_is_all_that_is_said(
    make_trainer: MakeTrainer, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the log nor the writers are told of a checkpoint that was not loaded; of one that was they are."""
    trainer = make_trainer(work_dir=saved, max_epochs=3)
    trainer.optimizer.param_groups[0]["lr"] = 0.5
    told: list[str] = []
    trainer.bus.subscribe(lambda event: told.append(event.path), "after_load_checkpoint", offload="thread")

    with caplog.at_level(logging.INFO), pytest.raises(CheckpointError, match="of a run with other settings"):
        trainer.resume("epoch_1")
    assert isinstance(trainer.model, torch.nn.Sequential)
    trainer.model.append(torch.nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match="is of another model"):
        trainer.load_checkpoint("epoch_1")
    trainer.bus.flush()
    assert (told, caplog.text) == ([], "")

    del trainer.model[-1]
    trainer.resume("epoch_1", changed="keep")
    trainer.bus.flush()
    assert told == [str(saved / "epoch_1")]
    assert "max_epochs: 2 in the checkpoint, 3 in this trainer; the run goes on with 3" in caplog.text
