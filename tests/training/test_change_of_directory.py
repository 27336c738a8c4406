"""A program that changes its directory during a run given a relative `work_dir`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from eventloop.costs.records import FILE
from eventloop.hooks import CheckpointHook, LoggerHook
from eventloop.util.anchored_path import Anchored
from eventloop.writers import (
    CSVWriter,
    EventLogWriter,
    ImageFileWriter,
    JSONLWriter,
    TensorBoardWriter,
    Writer,
)
from tests.support.trainers import MakeTrainer


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to go to from `tmp_path`, which the test begins in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "elsewhere"


@pytest.mark.parametrize("removed", [False, True])
def test_every_file_is_where_the_run_was_built(
    make_trainer: MakeTrainer, tmp_path: Path, elsewhere: Path, removed: bool
) -> None:
    """Those of the writers, the costs, the trace and the copies of logs, also where the new directory is gone; nothing is
    left elsewhere."""
    writers: list[Writer] = [JSONLWriter(), CSVWriter(), EventLogWriter(), ImageFileWriter()]
    writers += [
        TensorBoardWriter(offload="thread"),
        TensorBoardWriter("logs", name="other", offload="thread"),
    ]
    hooks = [LoggerHook(out_dir="copies")]
    trainer = make_trainer(max_epochs=1, work_dir="run", hooks=hooks, writers=writers)

    @trainer.bus.on("after_train_iter", once=True)
    def change_directory(trainer: Any, event: Any) -> None:
        os.chdir(elsewhere)
        if removed:
            elsewhere.rmdir()
        trainer.metrics.put_image("sample", trainer.batch[0].new_zeros(1, 4, 4))

    trainer.train()
    trainer.close()

    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {FILE, "metrics.jsonl", "metrics.csv", "events.evl", "images", "tensorboard", "epoch_1"}
    assert [*(tmp_path / "run" / "images").rglob("*.png")]
    assert [*(tmp_path / "logs").iterdir()]
    assert (tmp_path / "copies" / "run" / "metrics.jsonl").exists()
    assert removed or [*elsewhere.iterdir()] == []
    assert trainer.work_dir == tmp_path / "run"


def test_a_run_that_was_left_before_it_began(
    make_trainer: MakeTrainer, tmp_path: Path, elsewhere: Path
) -> None:
    """Its checkpoints are found from elsewhere, those of a hook with a directory of its own too."""
    hooks = [CheckpointHook(interval=1), CheckpointHook(interval=1, out_dir="out")]
    make_trainer(max_epochs=1, work_dir="run", hooks=hooks).train()
    hooks = [CheckpointHook(interval=1), CheckpointHook(interval=1, out_dir="out")]
    trainer = make_trainer(max_epochs=2, work_dir="run", hooks=hooks)
    assert trainer.state.directories == [Path("run"), Path("out/run")]

    os.chdir(elsewhere)

    assert trainer.state.directories == [tmp_path / "run", tmp_path / "out" / "run"]
    assert trainer.checkpoint_dir == tmp_path / "run"
    assert trainer.resume("auto").name == "epoch_1"


def test_a_path_is_shown_as_it_was_given(tmp_path: Path, elsewhere: Path) -> None:
    """For as long as it leads there, and again once it does."""
    place, absolute = Anchored(Path("run")), Anchored(tmp_path / "run")
    shown = [place.path]
    for directory in (elsewhere, tmp_path):
        os.chdir(directory)
        shown.append(place.path)
        assert absolute.path == tmp_path / "run"

    assert shown == [Path("run"), tmp_path / "run", Path("run")]
