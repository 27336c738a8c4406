"""Writers and the disk: when EventLogWriter calls fsync, what it does where that fails, and a disk that gets full."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest
import torch

from eventloop.events import HandlerFailed
from eventloop.events.run import Run
from eventloop.util.append_file import write_all
from eventloop.writers import EventLogWriter, JSONLWriter, TensorBoardWriter, Writer
from tests.conftest import DEADLINE
from tests.support.internals import substitute
from tests.support.trainers import MakeTrainer, batches
from tests.writers.conftest import Account, Attach, train, write

IO_ERROR = OSError(5, "Input/output error")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.evl"


class Synced:
    """Stands for `os.fsync`: counts the calls for the log, and knows its size at the last one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = self.calls = 0
        self.called = threading.Event()
        self.error: OSError | None = None
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor: int) -> None:
        self._fsync(descriptor)
        if not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            self.calls += 1
            self.size = os.fstat(descriptor).st_size
            self.called.set()
            if self.error is not None:
                raise self.error


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Synced:
    return Synced(monkeypatch)


def test_flush_syncs(attach: Attach, path: Path, synced: Synced) -> None:
    """Events that were flushed survive a crash of the machine, however long the interval is."""
    bus = attach(EventLogWriter(fsync_seconds=3600))
    bus.emit(train(1)[0])
    bus.flush()

    assert synced.size == path.stat().st_size


def test_interval_zero_syncs_each_write_and_none_never(attach: Attach, path: Path, synced: Synced) -> None:
    """0 is for runs that may lose nothing, None for scratch runs on slow disks."""
    write(attach(EventLogWriter(fsync_seconds=None)), *train(1))
    assert synced.calls == 0

    write(attach(EventLogWriter(fsync_seconds=0)), *train(*range(1, EventLogWriter.batch + 2)))
    assert synced.calls >= 3  # the facts of the run, two pieces, and the close
    assert synced.size == path.stat().st_size


def test_writes_sync_once_an_interval(path: Path, synced: Synced, monkeypatch: pytest.MonkeyPatch) -> None:
    """One write in each interval and the close sync."""
    now = [1000.0]
    substitute(monkeypatch, "event_log_writer.monotonic", lambda: now[0])
    writer = EventLogWriter(fsync_seconds=10.0)
    writer.open(Run(work_dir=str(path.parent)))
    calls = []
    for now[0] in (1001.0, 1009.0, 1010.0, 1011.0):
        writer.write_batch([*train(1)])
        calls.append(synced.calls)
    writer.close()

    assert calls == [1, 1, 2, 2]
    assert (synced.calls, synced.size) == (3, path.stat().st_size)


def test_a_failed_sync_is_no_secret(attach: Attach, account: Account, synced: Synced) -> None:
    """It disables the writer at the next write, as the content of the disk is unknown."""
    synced.error = IO_ERROR
    bus = attach(EventLogWriter(fsync_seconds=0.001))
    bus.emit(train(1)[0])
    assert synced.called.wait(DEADLINE)

    while not account(bus).failed:
        bus.emit(train(2)[0])
        bus.flush()

    assert "Input/output error" in account(bus).error


# --- a full disk -----------------------------------------------------------------------------------------------

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

    substitute(patch, f"{module}.write_all", write)


@pytest.mark.representative(1)
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
        [sys.executable, "-c", LIMITED],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )

    assert ran.stdout == "[error] OSError: [Errno 27] File too large: 'events.evl' True True None\n"
