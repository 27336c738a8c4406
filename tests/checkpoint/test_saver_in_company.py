"""Test the saver beside a slow disk, a stopped process and a signal: nothing waits for what does not run."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from time import monotonic

import pytest

from eventloop.checkpoint import load_checkpoint
from eventloop.checkpoint.commit import Removals, commit
from eventloop.checkpoint.disk import Disk
from eventloop.checkpoint.saving import saver_client
from eventloop.checkpoint.saving.saver import Saver
from eventloop.checkpoint.saving.saver_client import Job
from eventloop.checkpoint.serialize import serialize
from tests.support.recording_disk import RecordingDisk
from tests.support.saving import DEADLINE, a_state, assert_same, no_thread_while_it_starts

needs_a_process = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd_create")


@pytest.fixture
def urgent() -> list[bool]:
    """A list whose one value says whether a signal has asked the program to end."""
    return [False]


@pytest.fixture
def saver(urgent: list[bool], tmp_path: Path) -> Iterator[Saver]:
    """Return a saver whose process has started."""
    saver = Saver(urgent=lambda: urgent[0])
    saver.save(a_state(0.0), Job(tmp_path / "zero")).result(DEADLINE)
    assert saver.process is not None
    assert saver.process.ready(DEADLINE)
    yield saver
    saver.close()


SLOW_DISK = """
import os, runpy, sys, time

sync = os.fsync
os.fsync = lambda descriptor: (time.sleep({seconds}), sync(descriptor))
sys.argv = [argument for argument in sys.argv[1:] if argument not in ("-I", "-S")]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def interpreter_of_children(folder: Path, source: str) -> str:
    """Return an interpreter for new processes that runs a script, which runs the program."""
    script, interpreter = folder / "slow.py", folder / "python"
    script.write_text(source)
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    interpreter.chmod(0o755)
    return str(interpreter)


# --- priority ----------------------------------------------------------------------------------------------


@needs_a_process
def test_the_process_has_the_priority_of_the_training(saver: Saver) -> None:
    """The saver's process, for which the end of a run waits, has the niceness and policy of the program."""
    assert saver.process is not None
    pid = saver.process.pid

    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)
    assert os.sched_getscheduler(pid) == os.sched_getscheduler(0)


@pytest.mark.slow
@needs_a_process
def test_a_small_save_does_not_wait_for_the_start(tmp_path: Path) -> None:
    """A small save that arrives while the process starts is written at once, by a thread."""
    saver = Saver()
    saver.save(a_state(1.0), Job(tmp_path / "a")).result(DEADLINE)
    assert saver.process is not None
    os.kill(saver.process.pid, signal.SIGSTOP)  # it never gets ready
    saver.save(a_state(2.0), Job(tmp_path / "b")).result(DEADLINE)

    assert_same(load_checkpoint(tmp_path / "b"), 2.0)
    saver.close()


# --- signs of life -----------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_a_process
def test_a_slow_disk_is_no_reason_to_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A save that takes longer than the limit of silence is finished by the process that writes it."""
    no_thread_while_it_starts(monkeypatch)
    monkeypatch.setattr(sys, "executable", interpreter_of_children(tmp_path, SLOW_DISK.format(seconds=4.0)))
    monkeypatch.setattr(saver_client, "SILENT_SECONDS", 3.0)
    saver, began = Saver(), monotonic()
    saver.save(a_state(1.0), Job(tmp_path / "a")).result(DEADLINE)

    assert monotonic() - began > 2 * 4.0  # those of the files at the same time, then that of the folder
    assert caplog.text == ""
    assert saver.process is not None
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)
    saver.close()


@needs_a_process
def test_a_stopped_process_is_given_up_soon_after_a_signal(
    saver: Saver, urgent: list[bool], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a signal a stopped process is killed, its save is written by a thread, and no other is started."""
    assert saver.process is not None
    os.kill(saver.process.pid, signal.SIGSTOP)
    first = saver.save(a_state(1.0), Job(tmp_path / "a"))
    urgent[0] = True
    began = monotonic()
    first.result(DEADLINE)
    saver.save(a_state(2.0), Job(tmp_path / "b")).result(DEADLINE)

    assert monotonic() - began < saver_client.SILENT_SECONDS
    assert saver.process is None
    assert "it gave no sign of life for 1 s, and was killed" in caplog.text
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)
    assert_same(load_checkpoint(tmp_path / "b"), 2.0)


SLOW_START = """
import runpy, sys, time

while time.process_time() < 3.0:
    pass
sys.argv = [argument for argument in sys.argv[1:] if argument not in ("-I", "-S")]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@needs_a_process
def test_a_slow_start_is_no_reason_to_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that computes for longer than the limit of silence while it starts is waited for, and writes."""
    no_thread_while_it_starts(monkeypatch)
    monkeypatch.setattr(sys, "executable", interpreter_of_children(tmp_path, SLOW_START))
    monkeypatch.setattr(saver_client, "SILENT_SECONDS", 1.0)
    saver, began = Saver(), monotonic()
    saver.save(a_state(1.0), Job(tmp_path / "a")).result(DEADLINE)

    assert monotonic() - began > 3.0
    assert caplog.text == ""
    assert saver.process is not None
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)
    saver.close()


# --- syncs -------------------------------------------------------------------------------------------------


class MeetingDisk(Disk):
    """A disk on which the syncs of the files of one checkpoint wait for each other."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(3, timeout=DEADLINE)

    def sync(self, file: FileIO) -> None:
        """Wait for the other two."""
        self.barrier.wait()
        super().sync(file)

    def sync_directory(self, path: Path) -> None:
        """Wait for the other two, if it is the directory of the files."""
        if path.name.startswith(".a."):
            self.barrier.wait()
        super().sync_directory(path)


def test_the_files_of_a_checkpoint_are_synced_at_the_same_time(tmp_path: Path) -> None:
    """A save makes two syncs in a row, as by hand: its files with their directory, then the name."""
    (outcome,) = commit([serialize(a_state(1.0), tmp_path / "a")], MeetingDisk())

    assert outcome.error is None
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)


def test_removals_make_no_sync_of_their_own_while_saves_follow(tmp_path: Path) -> None:
    """The sync of a save's name serves the removal by the save before it; the last removal has its own."""
    disk = RecordingDisk(tmp_path)
    removals = Removals(disk)
    for number in range(1, 4):
        save = serialize(a_state(float(number)), tmp_path / f"{number}")
        commit([save._replace(replaces=(tmp_path / f"{number - 1}",))], disk, removals=removals)
    synced = disk.calls.count("sync directory .")
    left = sorted(os.listdir(tmp_path))
    removals.finish()

    assert synced == 3
    assert left[-1] == "3"
    assert [name.startswith(".2.") for name in left[:-1]] == [True]
    assert disk.calls.count("sync directory .") == 4
    assert os.listdir(tmp_path) == ["3"]


def test_removals_wait_for_a_sync_that_succeeds(tmp_path: Path) -> None:
    """A renamed checkpoint is not removed after a sync that failed, because its old name may come back."""
    disk = RecordingDisk(tmp_path)
    removals = Removals(disk)
    commit([serialize(a_state(1.0), tmp_path / "1")], disk)
    save = serialize(a_state(2.0), tmp_path / "2")
    commit([save._replace(replaces=(tmp_path / "1",))], disk, removals=removals)

    def fail(call: str) -> None:
        if call == "sync directory .":
            raise OSError("input/output error")

    disk.before = fail
    (outcome,) = commit([serialize(a_state(3.0), tmp_path / "3")], disk, removals=removals)

    assert str(outcome.error) == "input/output error"
    assert any(name.startswith(".1.") for name in os.listdir(tmp_path))


def test_a_save_of_a_thread_is_durable_after_two_syncs_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sync for the removal of a replaced checkpoint is made once the save is durable, by a thread too."""
    saver, durable, folder, fsync = Saver(process=False), threading.Event(), tmp_path.stat(), os.fsync
    saver.save(a_state(1.0), Job(tmp_path / "a")).result(DEADLINE)
    synced: list[bool] = []

    def sync(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), folder):
            synced.append(len(synced) == 0 or durable.wait(DEADLINE))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    saver.save(a_state(2.0), Job(tmp_path / "b", replaces=(tmp_path / "a",))).result(DEADLINE)
    durable.set()
    saver.close()

    assert synced == [True, True]
    assert os.listdir(tmp_path) == ["b"]
