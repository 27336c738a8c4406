"""EventLogWriter and the disk: when it calls fsync, and what it does where that fails."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from eventloop.events.run import Run
from eventloop.writers import event_log_writer
from eventloop.writers.event_log_writer import EventLogWriter
from tests import no_threads
from tests.conftest import DEADLINE
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


def test_a_write_is_synced_within_the_interval(attach: Attach, path: Path, synced: Synced) -> None:
    """No other event needs to follow; later writes are synced by close."""
    bus = attach(EventLogWriter(fsync_interval=0.01))
    bus.emit(train(1)[0])

    assert synced.called.wait(DEADLINE)
    bus.close()

    assert synced.size == path.stat().st_size


def test_flush_syncs(attach: Attach, path: Path, synced: Synced) -> None:
    """Events that were flushed survive a crash of the machine, however long the interval is."""
    bus = attach(EventLogWriter(fsync_interval=3600))
    bus.emit(train(1)[0])
    bus.flush()

    assert synced.size == path.stat().st_size


def test_interval_zero_syncs_each_write_and_none_never(attach: Attach, path: Path, synced: Synced) -> None:
    """0 is for runs that may lose nothing, None for scratch runs on slow disks."""
    write(attach(EventLogWriter(fsync_interval=None)), *train(1))
    assert synced.calls == 0

    write(attach(EventLogWriter(fsync_interval=0)), *train(*range(1, EventLogWriter.batch + 2)))
    assert synced.calls >= 3  # the facts of the run, two pieces, and the close
    assert synced.size == path.stat().st_size


def test_without_a_thread_writes_sync_themselves(
    path: Path, synced: Synced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no thread can be started, one write in each interval and the close sync."""
    no_threads.refuse(monkeypatch)
    now = [1000.0]
    monkeypatch.setattr(event_log_writer, "monotonic", lambda: now[0])
    writer = EventLogWriter(fsync_interval=10.0)
    writer.open(Run(work_dir=str(path.parent)))
    calls = []
    for now[0] in (1001.0, 1009.0, 1010.0, 1011.0):
        writer.write_batch([*train(1)])
        calls.append(synced.calls)
    writer.close()

    assert calls == [1, 1, 2, 2]
    assert (synced.calls, synced.size) == (3, path.stat().st_size)


@pytest.mark.parametrize("behind", [0, 3])
def test_a_sync_that_fails_beside_a_close_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    """A close waits for the sync in progress, also with events written behind it: the system reports an error of the
    file once, to the first that syncs it."""
    began, fails = threading.Event(), threading.Event()

    def fsync(descriptor: int) -> None:
        if threading.current_thread().name == "eventloop fsync" and not began.is_set():
            began.set()
            assert fails.wait(DEADLINE)
            raise IO_ERROR

    monkeypatch.setattr(os, "fsync", fsync)
    writer = EventLogWriter(fsync_interval=0.001)
    writer.open(Run(work_dir=str(path.parent)))
    writer.write_batch([*train(1)])
    assert began.wait(DEADLINE)
    for _ in range(behind):
        writer.write_batch([*train(1)])
    assert [thread.name for thread in threading.enumerate()].count("eventloop fsync") <= 2
    errors: list[OSError] = []

    def close() -> None:
        try:
            writer.close()
        except OSError as error:
            errors.append(error)

    closing = threading.Thread(target=close)
    closing.start()
    closing.join(0.05)  # a close that does not wait is over by then
    fails.set()
    closing.join(DEADLINE)
    assert errors == [IO_ERROR]


def test_a_failed_sync_is_no_secret(attach: Attach, account: Account, synced: Synced) -> None:
    """It disables the writer at the next write, as the content of the disk is unknown."""
    synced.error = IO_ERROR
    bus = attach(EventLogWriter(fsync_interval=0.001))
    bus.emit(train(1)[0])
    assert synced.called.wait(DEADLINE)

    while not account(bus).failed:
        bus.emit(train(2)[0])
        bus.flush()

    assert "Input/output error" in account(bus).error
