"""A disk that gets full under a writer of a training: the writer fails, visibly, and the training does not notice."""

from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest
import torch

from eventloop.events import HandlerFailed
from eventloop.util.append_file import write_all
from eventloop.writers import JSONLWriter, TensorBoardWriter
from eventloop.writers.event_log_writer import EventLogWriter
from eventloop.writers.writer import Writer
from tests.support.trainers import MakeTrainer, batches

WRITERS: dict[str, tuple[Callable[[], Writer], int]] = {
    "jsonl": (lambda: JSONLWriter(events="*"), 2),
    "tensorboard": (TensorBoardWriter, 3),
    "event_log_writer": (EventLogWriter, 4),
}
"""By module: a writer, and which of its writes meets the full disk."""


def fill_disk(patch: pytest.MonkeyPatch, module: str, number: int) -> None:
    """From the `number`-th on the writes of a module find room for half of what they write."""
    calls = 0

    def write(file: FileIO, data: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls < number:
            write_all(file, data)
            return
        file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(importlib.import_module(f"eventloop.writers.{module}"), "write_all", write)


@pytest.mark.parametrize("module", WRITERS)
def test_a_full_disk_changes_no_weight(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    """Training completes with the same weights as without the writer, whose failure is reported in handler_failed, on the
    training thread, and in the summary."""
    make, number = WRITERS[module]
    fill_disk(monkeypatch, module, number)
    writer = make()
    without = make_trainer(work_dir=tmp_path / "without", train_loader=batches(4))
    without.train()
    trainer = make_trainer(work_dir=tmp_path / "with", train_loader=batches(4), writers=[writer])
    trainer.bus.subscribe(lambda event: trainer.bus.flush(), "after_train_epoch")
    failures: list[HandlerFailed] = []
    trainer.bus.subscribe(failures.append, "handler_failed")
    trainer.train()

    assert trainer.iter == without.iter
    for key, value in without.model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[key], value)
    name = type(writer).__name__
    assert [(failed.handler, failed.error) for failed in failures] == [
        (name, "OSError: [Errno 28] No space left on device")
    ]
    assert f"{name}: " in trainer.summary().split("not everything was delivered:")[1]


LIMITED = """
import resource
from eventloop.bus import Bus
from eventloop.eventlog.reader import read_events
from eventloop.events import AfterTrainIter
from eventloop.events.run import Run
from eventloop.writers.event_log_writer import EventLogWriter

resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
bus = Bus()
EventLogWriter().attach(bus, lambda: Run(work_dir="."))
for iteration in range(1000):
    bus.emit(AfterTrainIter(iter=iteration))
    if iteration % 20 == 0:
        bus.flush()
(stats,) = bus.stats()
reader = read_events(".")
kept = [record.event.iter for record in reader]
print(stats.error, stats.delivered == len(kept), kept == list(range(len(kept))), reader.torn)
"""


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """The system's own limit, met in the middle of a write: what was delivered is there, and nothing is torn."""
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip

    assert ran.stdout == "[error] OSError: [Errno 27] File too large: 'events.evl' True True None\n"
