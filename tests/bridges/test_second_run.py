"""A bridge whose directory another run owns writes into a new one, and its host does not notice."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop.bridges.attachment import Attachment
from eventloop.checkpoint import find_checkpoints
from eventloop.hooks import CheckpointHook
from eventloop.ownership import read_owner
from eventloop.writers import JSONLWriter
from tests.ownership.trainings import alive, contents
from tests.support.trainers import batches, build_trainer, tiny_model


def host_run(work_dir: Path, **options: Any) -> Attachment:
    """Run what a bridge tells of a host's training of two epochs."""
    options = {"hooks": [], "writers": [JSONLWriter()], "measure": True, **options}
    attachment = Attachment("ignite", {}, None, work_dir=work_dir, **options)
    drive(attachment, tiny_model())
    return attachment


def drive(attachment: Attachment, model: torch.nn.Module) -> None:
    trainer = attachment.begin_run(model, native=object(), max_epochs=2)
    for _ in range(2):
        trainer.begin_epoch(3)
        for batch in batches(3):
            trainer.begin_iter(batch)
            trainer.end_iter({"loss": torch.tensor(1.0)})
        trainer.end_epoch()
    attachment.end_run()


def test_beside_a_live_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its files, its checkpoints too, are in a directory with a number; one line says so, and the live run's stay."""
    run = tmp_path / "run"
    loop = (trainer := build_trainer(run)).epochs()
    next(loop)
    before = contents(run)

    second = CheckpointHook(1, out_dir=tmp_path / "out")
    second.name = "second"
    with caplog.at_level(logging.ERROR):
        attachment = host_run(run, hooks=[CheckpointHook(1), second])

    assert contents(run) == before
    beside = tmp_path / "run-2"
    assert attachment.trainer is not None
    assert attachment.trainer.work_dir == beside
    assert [path.name for path in find_checkpoints(beside)] == ["epoch_1", "epoch_2"]
    assert [path.name for path in find_checkpoints(tmp_path / "out" / "run-2")] == ["epoch_1", "epoch_2"]
    assert (beside / "metrics.jsonl").is_file()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{run} is in use: another run of this process")
    assert line.endswith(f"this run of ignite writes in {beside} instead")
    assert read_owner(beside) is None
    trainer.close()


def test_each_run_beside_a_live_one_has_its_own(tmp_path: Path) -> None:
    """A second bridge takes the next number; a bridge stays where it is in its host's later runs."""
    run = tmp_path / "run"
    with alive(run):
        first, second = host_run(run), host_run(run)
        assert first.trainer is not None
        drive(first, first.trainer.model)
    places = [
        attachment.trainer.work_dir.name for attachment in (first, second) if attachment.trainer is not None
    ]
    assert places == ["run-2", "run-3"]


def test_a_bridge_waits_for_no_run_that_ends(tmp_path: Path) -> None:
    """The start of its host's training is not held up."""
    run = tmp_path / "run"
    trainer, attachments = build_trainer(run), list[Attachment]()
    trainer.bus.subscribe(lambda event: attachments.append(host_run(run)), "after_train", name="host")
    trainer.train()
    assert attachments[0].trainer is not None
    assert attachments[0].trainer.work_dir == tmp_path / "run-2"


def test_a_bridge_in_a_free_directory(tmp_path: Path) -> None:
    """It owns it during its host's run, and gives it back."""
    run = tmp_path / "run"
    host_run(run)
    assert (run / "metrics.jsonl").is_file()
    assert read_owner(run) is None
    build_trainer(run, max_epochs=1).train()
