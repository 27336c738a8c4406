"""`trainer.resume("iter_50")`: a name alone is looked for where the run's checkpoints are."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop.checkpoint import CheckpointError
from eventloop.hooks import CheckpointHook
from tests.support.trainers import MakeTrainer


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
        FileNotFoundError, match=r"no checkpoint at epoch_1, nor .* in .*new, which holds no checkpoint"
    ):
        make_trainer(work_dir=tmp_path / "new").resume("epoch_1")


@pytest.mark.parametrize("name", ["last", "latest", "newest", "last.ckpt", "Latest"])
def test_other_names_of_the_newest(make_trainer: MakeTrainer, saved: Path, name: str) -> None:
    """Get the one that it has here, and what that is."""
    trainer = make_trainer(work_dir=saved)

    with pytest.raises(
        FileNotFoundError, match=rf'no checkpoint at {name}, .*: "auto" takes the newest one, epoch_2$'
    ):
        trainer.resume(name)
    with pytest.raises(
        FileNotFoundError, match=r'no checkpoint at .*: "auto" takes the newest one, epoch_2$'
    ):
        trainer.resume(saved / name)


@pytest.mark.parametrize(
    ("path", "error"), [(True, TypeError), (None, TypeError), (3, TypeError), ("", ValueError)]
)
def test_what_is_no_path(make_trainer: MakeTrainer, saved: Path, path: Any, error: type[Exception]) -> None:
    """Is refused with what is expected."""
    with pytest.raises(
        error, match=rf'"auto", "best", or the path or name .*, got {path or "."}.*"auto" takes the newest'
    ):
        make_trainer(work_dir=saved).resume(path)


def test_a_directory_of_checkpoints(make_trainer: MakeTrainer, saved: Path, tmp_path: Path) -> None:
    """Is none; its newest are named. Of the run's own that is "auto"."""
    others = tmp_path / "others"
    make_trainer(work_dir=others, max_epochs=7).train()
    trainer = make_trainer(work_dir=saved)

    with pytest.raises(
        FileNotFoundError,
        match=r'run is not a checkpoint, but a directory of them: epoch_2, epoch_1, the newest first: "auto" takes the newest',
    ):
        trainer.resume(saved)
    with pytest.raises(
        FileNotFoundError,
        match=r"epoch_7, epoch_6, epoch_5, epoch_4, epoch_3 and 2 more, the newest first; the newest is",
    ):
        trainer.resume(others)
    with pytest.raises(FileNotFoundError, match=r"elsewhere is not a checkpoint, as it has no manifest"):
        trainer.load_checkpoint(tmp_path / "elsewhere")


def test_one_that_was_removed(make_trainer: MakeTrainer, saved: Path) -> None:
    """A number below those that are there is no misspelled one: the newest that are there are named."""
    shutil.rmtree(saved / "epoch_1")
    trainer = make_trainer(work_dir=saved)

    for name in ("epoch_1", saved / "epoch_1", "epoch_1.pth"):
        with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*epoch_1.*: there is epoch_2$"):
            trainer.resume(name)


def test_a_damaged_one_by_its_name(make_trainer: MakeTrainer, saved: Path) -> None:
    """Is refused, with what can be done."""
    (saved / "epoch_2" / "state.pth").write_bytes(b"half a file")

    with pytest.raises(
        CheckpointError,
        match=r"is damaged: it has 11 bytes.*; \"auto\" takes the newest intact checkpoint, and `eventloop checkpoints .*run --ve",
    ):
        make_trainer(work_dir=saved).resume("epoch_2")


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
    with pytest.raises(CheckpointError, match="does not fit the model"):
        trainer.load_checkpoint("epoch_1")
    trainer.bus.flush()
    assert (told, caplog.text) == ([], "")

    del trainer.model[-1]
    trainer.resume("epoch_1", changed="keep")
    trainer.bus.flush()
    assert told == [str(saved / "epoch_1")]
    assert "max_epochs: 2 in the checkpoint, 3 in this trainer; the run continues with 3" in caplog.text
