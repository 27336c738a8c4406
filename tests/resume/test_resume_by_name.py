"""Test `trainer.resume("iter_50")`: a name alone is searched in the directories of the run."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest

from eventloop.checkpoint import CheckpointError
from tests.support.trainers import MakeTrainer


@pytest.fixture
def saved(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a finished run of two epochs, and change to another working directory."""
    make_trainer(work_dir=tmp_path / "run").train()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["epoch_1", "epoch_1.pth"])
def test_in_the_work_dir(make_trainer: MakeTrainer, saved: Path, name: str) -> None:
    """A checkpoint is found by name, also with MMEngine's suffix, to resume and to load weights."""
    trainer = make_trainer(work_dir=saved)

    assert trainer.resume(name) == saved / "epoch_1"
    assert trainer.epoch == 1
    trainer.load_checkpoint(name)


def test_a_path_that_exists_comes_first(make_trainer: MakeTrainer, saved: Path) -> None:
    """A path that exists in the working directory is taken before one in the run's directory."""
    (saved / "epoch_2").rename("epoch_1")

    trainer = make_trainer(work_dir=saved)

    assert trainer.resume("epoch_1") == Path("epoch_1")
    assert trainer.epoch == 2


def test_a_name_that_is_nowhere(make_trainer: MakeTrainer, saved: Path, tmp_path: Path) -> None:
    """The error has both places that were searched, and the newest checkpoints that exist."""
    found = "there are epoch_2, epoch_1, the newest first"
    cases: list[tuple[Path, str | Path, str]] = [
        (
            saved,
            "epoch_11",
            rf'no checkpoint at epoch_11, nor one of that name in .*run: {found}: "auto" takes the newest one$',
        ),
        (saved, saved / "epoch_22", rf"no checkpoint at .*epoch_22: {found}$"),
        (tmp_path / "new", "epoch_1", "no checkpoint at epoch_1, nor .* in .*new, which holds no checkpoint"),
    ]
    for work_dir, name, message in cases:
        with pytest.raises(FileNotFoundError, match=message):
            make_trainer(work_dir=work_dir).resume(name)


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("path", "error"), [(True, TypeError), (None, TypeError), (3, TypeError), ("", ValueError)]
)
def test_what_is_no_path(make_trainer: MakeTrainer, saved: Path, path: Any, error: type[Exception]) -> None:
    """A value that is not a path is refused with the expected ones."""
    with pytest.raises(
        error, match=rf'"auto", "best", or the path or name .*, got {path or "."}.*"auto" takes the newest'
    ):
        make_trainer(work_dir=saved).resume(path)


def test_a_directory_of_checkpoints(make_trainer: MakeTrainer, saved: Path, tmp_path: Path) -> None:
    """A directory of checkpoints is refused with its newest ones, and "auto" if it is the run's own."""
    others = tmp_path / "others"
    make_trainer(work_dir=others, max_epochs=7).train()
    trainer = make_trainer(work_dir=saved)

    for path, message in [
        (saved, 'a directory of them: epoch_2, epoch_1, the newest first: "auto" takes the newest'),
        (others, "epoch_7, epoch_6, epoch_5, epoch_4, epoch_3 and 2 more, the newest first$"),
        (tmp_path / "elsewhere", "elsewhere is not a checkpoint, as it has no manifest"),
    ]:
        with pytest.raises(FileNotFoundError, match=message):
            trainer.resume(path)


def test_a_damaged_one_by_its_name(make_trainer: MakeTrainer, saved: Path) -> None:
    """A damaged checkpoint is refused with advice."""
    (saved / "epoch_2" / "state.pth").write_bytes(b"half a file")

    with pytest.raises(
        CheckpointError, match=r'damaged: it has 11 bytes.*; "auto" takes .* `eventloop checkpoints '
    ):
        make_trainer(work_dir=saved).resume("epoch_2")


def test_a_refusal_is_all_that_is_said(
    make_trainer: MakeTrainer, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused checkpoint is neither logged nor announced as an event; a loaded one is both."""
    trainer = make_trainer(work_dir=saved, max_epochs=3)
    trainer.optimizer.param_groups[0]["lr"] = 0.5
    told: list[str] = []
    trainer.bus.subscribe(lambda event: told.append(event.path), "after_load_checkpoint", offload="thread")
    heard: list[Any] = []

    for changed in ("refuse", "keep"):
        with caplog.at_level(logging.INFO), contextlib.suppress(CheckpointError):
            trainer.resume("epoch_1", changed=changed)
        trainer.bus.flush()
        heard.append(([*told], "max_epochs: 2 in the checkpoint, 3 in this trainer" in caplog.text))

    assert heard == [([], False), ([str(saved / "epoch_1")], True)]
