"""A saver's process that is stopped, or has no time: what it has is written all the same, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import pytest
import torch

from eventloop.checkpoint import load_checkpoint
from eventloop.checkpoint.saving import saver_client
from eventloop.checkpoint.saving.save_timeout import ALONE, AWAITED, SavePromise, SaveTimeouts, TimeLimit
from eventloop.checkpoint.saving.saver import STARTS, Saver, SaveReplacedError
from eventloop.checkpoint.saving.saver_client import Job, ProcessGoneError, SaverProcess
from eventloop.checkpoint.saving.snapshot import Snapshot
from tests.support.saving import DEADLINE, Gate, a_state, assert_same, write

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd_create")

AT_ONCE = TimeLimit(0.0, 0.0, inf)
NEVER = TimeLimit(1e9, 1.0, 1.0)


@pytest.fixture
def stopped(make_saver: Callable[..., Saver]) -> Iterator[tuple[Saver, SaverProcess]]:
    """A saver whose process is ready, and stopped."""
    saver = make_saver(process=True)
    assert saver.process is not None
    process = saver.process
    os.kill(process.pid, signal.SIGSTOP)
    yield saver, process
    process.kill()


@pytest.mark.slow
def test_who_waits_waits_no_longer_than_for_a_thread(
    stopped: tuple[Saver, SaverProcess],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """The process that does not go on is ended, and the thread writes the same copy; what it had begun is removed."""
    monkeypatch.setattr("eventloop.checkpoint.saving.save_timeout.AWAITED", AT_ONCE)
    saver, process = stopped
    begun = tmp_path / f".a.{process.pid}-1.tmp"
    begun.mkdir()
    state = a_state(1.0)
    written = saver.save(state, Job(tmp_path / "a"))
    state["state_dict"]["w"].fill_(-1.0)
    assert isinstance(written, SavePromise)
    while written.process is None:  # until the thread has given it
        written.wait(0.01)

    written.result()

    assert process.exit_code == -signal.SIGKILL
    assert not begun.exists()
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)
    assert (
        "takes too long in the process that writes it, and the training waits: the process is ended"
        in caplog.text
    )


@pytest.mark.slow
def test_a_superseded_save_is_given_up_to_the_next(
    stopped: tuple[Saver, SaverProcess],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """Where the time is short no thread writes the older state first, nor is it said to; nothing is left of it, and its
    buffers are free."""
    monkeypatch.setattr("eventloop.checkpoint.saving.save_timeout.AWAITED", NEVER)
    monkeypatch.setattr("eventloop.checkpoint.saving.save_timeout.SUPERSEDED", AT_ONCE)
    saver, process = stopped
    begun = tmp_path / f".a.{process.pid}-1.tmp"
    begun.mkdir()
    older = saver.save(a_state(1.0), Job(tmp_path / "a"))
    saver.supersede()

    with pytest.raises(SaveReplacedError, match="a newer state is to be saved at once"):
        older.result()
    saver.save(a_state(2.0), Job(tmp_path / "b", awaited=True)).result(DEADLINE)

    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert_same(load_checkpoint(tmp_path / "b"), 2.0)
    assert "is written by a thread" not in caplog.text


def test_a_superseded_save_that_a_thread_writes_is_finished(
    make_saver: Callable[..., Saver], gate: Gate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It takes no longer than the newer one."""
    monkeypatch.setattr("eventloop.checkpoint.saving.save_timeout.SUPERSEDED", AT_ONCE)
    saver = make_saver(gate.write, process=False)
    written = saver.save(a_state(1.0), Job(tmp_path / "a"))
    assert gate.entered.wait(DEADLINE)
    saver.supersede()
    gate.open.set()

    assert written.result().bytes > 0


@pytest.mark.slow
def test_who_closes_waits_no_longer_either(
    stopped: tuple[Saver, SaverProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`close` waits for what is under way as anybody does who needs it."""
    monkeypatch.setattr("eventloop.checkpoint.saving.save_timeout.AWAITED", AT_ONCE)
    monkeypatch.setattr("eventloop.checkpoint.saving.save_timeout.ALONE", NEVER)
    saver, _ = stopped
    written = saver.save(a_state(1.0), Job(tmp_path / "a"))
    assert isinstance(written, SavePromise)
    while written.process is None:  # until the thread has given it
        written.wait(0.01)
    closing = threading.Thread(target=saver.close, daemon=True)
    closing.start()
    closing.join(DEADLINE / 3)

    assert not closing.is_alive()
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)


@pytest.mark.slow
def test_a_save_that_somebody_has_waited_for_is_given_to_no_process(
    make_saver: Callable[..., Saver], gate: Gate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The wait may be over before the writing thread comes to it."""
    monkeypatch.setattr("eventloop.checkpoint.saving.save_timeout.AWAITED", AT_ONCE)
    saver = make_saver(gate.write, process=True, spare=True)
    first = saver.save(a_state(1.0), Job(tmp_path / "a", awaited=True))
    assert gate.entered.wait(DEADLINE)
    second = saver.save(a_state(2.0), Job(tmp_path / "b"))
    assert isinstance(second, SavePromise)
    second._hurry()
    gate.open.set()

    second.result(DEADLINE)

    assert (first.done(), len(gate.states)) == (True, 2)
    assert saver.process is not None
    assert saver.process.alive


@pytest.mark.slow
def test_a_save_that_nobody_waits_for_is_written_in_the_end(
    stopped: tuple[Saver, SaverProcess],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """A run that leaves out what is due while one is under way would otherwise never save again."""
    monkeypatch.setattr("eventloop.checkpoint.saving.save_timeout.ALONE", AT_ONCE)
    monkeypatch.setattr("eventloop.checkpoint.saving.save_timeout.AWAITED", NEVER)
    saver, process = stopped

    written = saver.save(a_state(1.0), Job(tmp_path / "a"))

    assert written.wait(DEADLINE)
    assert process.exit_code == -signal.SIGKILL
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)
    assert "the process could not: it had not answered after 0.0 s, and was killed" in caplog.text


@pytest.mark.slow
def test_a_process_that_does_not_read_holds_nobody(stopped: tuple[Saver, SaverProcess]) -> None:
    """Not even when what it is to be told is more than a pipe takes."""
    _, process = stopped
    packed = Snapshot(shared=True).pack(
        {"meta": {}, "state_dict": {"w": torch.ones(3)}, "text": "x" * (1 << 22)}
    )

    with pytest.raises(ProcessGoneError, match=r"it had not answered after 0\.1 s, and was killed"):
        process.save(packed, Job(Path("never")), 0.1)


@pytest.mark.slow
def test_a_process_that_reads_slowly_is_told_everything(
    make_saver: Callable[..., Saver], tmp_path: Path
) -> None:
    """A message of more than a pipe takes goes in pieces."""
    saver = make_saver(lambda state, job, given_up: pytest.fail("the thread wrote"), process=True)
    text = "x" * (1 << 22)

    saver.save({"meta": {}, "state_dict": {}, "text": text}, Job(tmp_path / "a")).result(DEADLINE)

    assert load_checkpoint(tmp_path / "a")["text"] == text


@pytest.mark.slow
def test_descriptors_may_be_many(make_saver: Callable[..., Saver], tmp_path: Path) -> None:
    """Loaders that share tensors by descriptors hold thousands of them: the process's come behind."""
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        saver = make_saver(lambda state, job, given_up: pytest.fail("the thread wrote"), process=True)
        saver.save(a_state(1.0), Job(tmp_path / "a")).result(DEADLINE)
    finally:
        for file in files:
            os.close(file)

    assert_same(load_checkpoint(tmp_path / "a"), 1.0)


class Looks:
    """Looks whether a process has answered, and their clock, which stands still until it is put forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waited = 0.0, threading.Semaphore(0)
        monkeypatch.setattr(saver_client, "monotonic", lambda: self.now)
        monkeypatch.setattr(saver_client, "LOOK_SECONDS", 0.01)
        wait_for = saver_client.wait_for

        def counted(descriptor: int, event: int, seconds: float) -> bool:
            found = wait_for(descriptor, event, seconds)
            if seconds > 0.0 and not found:
                self.waited.release()
            return found

        monkeypatch.setattr(saver_client, "wait_for", counted)


@pytest.mark.slow
def test_a_process_that_was_left_is_not_ended(
    stopped: tuple[Saver, SaverProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was promised to finish the save alone, however long that takes; and looking for its end burns no CPU."""
    monkeypatch.setattr("eventloop.checkpoint.saving.save_timeout.AWAITED", AT_ONCE)
    looks = Looks(monkeypatch)
    saver, process = stopped
    written = saver.save(a_state(1.0), Job(tmp_path / "a"))
    assert looks.waited.acquire(timeout=DEADLINE)
    assert saver.abandon() == "process"

    looks.now = 1e9
    while looks.waited.acquire(blocking=False):
        pass
    for _ in range(3):
        assert looks.waited.acquire(timeout=DEADLINE)
    os.kill(process.pid, signal.SIGCONT)

    written.result()
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)


@pytest.mark.slow
def test_a_process_that_does_not_die_is_used_no_more(
    stopped: tuple[Saver, SaverProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A kill waits until the disk has answered: what comes meanwhile is written by the thread, as what was begun."""
    saver, process = stopped
    monkeypatch.setattr(saver_client, "KILLED_SECONDS", 0.0)
    monkeypatch.setattr("eventloop.checkpoint.saving.save_timeout.ALONE", AT_ONCE)
    with monkeypatch.context() as disk_hangs:
        disk_hangs.setattr(subprocess.Popen, "kill", lambda process: None)
        saver.save(a_state(1.0), Job(tmp_path / "a")).result(DEADLINE)
        saver.save(a_state(2.0), Job(tmp_path / "b")).result(DEADLINE)

    assert (process.exit_code, process.alive, process.ready) == (None, False, False)
    assert [load_checkpoint(tmp_path / name)["meta"]["iter"] for name in "ab"] == [1, 2]


@pytest.mark.slow
def test_what_a_killed_process_was_removing_is_removed(
    stopped: tuple[Saver, SaverProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It gives what it removes another name first, which nobody else would look for before the next run."""
    saver, process = stopped
    removing = tmp_path / f".old.{process.pid}-1.old"
    removing.mkdir()
    monkeypatch.setattr("eventloop.checkpoint.saving.save_timeout.ALONE", AT_ONCE)

    saver.save(a_state(1.0), Job(tmp_path / "a", replaces=(tmp_path / "old",))).result(DEADLINE)

    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.slow
def test_a_stopped_process_with_nothing_to_do_is_not_waited_for(
    stopped: tuple[Saver, SaverProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saver is closed, and the process is no more."""
    monkeypatch.setattr("eventloop.checkpoint.saving.saver_client.EXIT_SECONDS", 0.0)
    saver, process = stopped

    saver.close()

    assert process.exit_code == -signal.SIGKILL


def test_another_process_takes_the_place_of_one_that_is_gone(tmp_path: Path) -> None:
    """Started by a later save, and only so often: one that always dies would cost its start each time."""
    saver = Saver(write, start_after=0.0)
    seen = []
    for number in range(STARTS + 2):
        saver.save(a_state(float(number)), Job(tmp_path / f"{number}")).result(DEADLINE)
        assert saver.process is not None
        seen.append(saver.process)
        saver.process.kill()
    saver.close()

    assert len(set(seen)) == STARTS
    assert_same(load_checkpoint(tmp_path / f"{STARTS + 1}"), STARTS + 1.0)


@pytest.mark.slow
def test_the_new_process_writes(make_saver: Callable[..., Saver], tmp_path: Path) -> None:
    """It is told of the memory that the one before knew."""
    saver = make_saver(process=True)
    saver.save(a_state(1.0), Job(tmp_path / "a")).result(DEADLINE)
    assert saver.process is not None
    saver.process.kill()
    saver.save(a_state(2.0), Job(tmp_path / "b")).result(DEADLINE)
    assert saver.process.wait_ready(DEADLINE)
    saver._write = lambda state, job, given_up: pytest.fail("the thread wrote")

    saver.save(a_state(3.0), Job(tmp_path / "c")).result(DEADLINE)

    assert_same(load_checkpoint(tmp_path / "c"), 3.0)


def test_patience_grows_with_what_is_written() -> None:
    """A fixed time, and what a slow disk needs for so many bytes."""
    patience = SaveTimeouts()

    assert patience.awaited(0) == AWAITED.seconds
    assert patience.in_background(100_000_000) == ALONE.seconds + 10.0


def test_patience_knows_slow_disks() -> None:
    """Where the fastest save was slow, the others may be as slow, and some more."""
    patience = SaveTimeouts()
    patience.learn(1_000_000, 50.0)
    patience.learn(1_000_000, 100.0)

    assert patience.awaited(2_000_000) == pytest.approx(AWAITED.seconds + 3 * 100.0)
    assert patience.in_background(2_000_000) == pytest.approx(ALONE.seconds + 10 * 100.0)
