"""Test the process that writes checkpoints: it imports no torch, and if it fails a thread writes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from eventloop.checkpoint import load_checkpoint, read_manifest
from eventloop.checkpoint.commit import AnySave, Outcome
from eventloop.checkpoint.manifest import Label
from eventloop.checkpoint.saving import saver_client
from eventloop.checkpoint.saving.group_writer import STARTS
from eventloop.checkpoint.saving.saver import Saver
from eventloop.checkpoint.saving.saver_client import Job, SaverProcess
from eventloop.checkpoint.serialize import serialize
from eventloop.hooks.preemption import KNOWN
from eventloop.processes.launch import bare_command
from tests import forked
from tests.support.process_support import until
from tests.support.saving import (
    DEADLINE,
    Late,
    a_state,
    assert_same,
    no_thread_while_it_starts,
    nothing_is_small,
    pointers,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd_create")

Make = Callable[..., Saver]


@pytest.fixture(autouse=True)
def from_the_first_save_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process write the first save, too."""
    no_thread_while_it_starts(monkeypatch)


def no_thread(saves: Sequence[AnySave], given_up: object, removals: object) -> list[Outcome]:
    """Fail every save that a thread would write in place of the process."""
    return [Outcome(error=AssertionError("the thread wrote"))] * len(saves)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings logged so far."""
    return [record.getMessage() for record in caplog.records if record.name == "eventloop"]


# --- writing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("small", [True, False])
def test_the_process_writes_the_state_of_the_call(
    make_saver: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """The process writes small and large states from the first save on, and removes the checkpoints they
    replace."""
    if not small:
        nothing_is_small(monkeypatch)
    saver = make_saver(no_thread, process=True)
    replaces: tuple[Path, ...] = ()
    for value in (1.0, 2.0, 3.0):
        state, path = a_state(value), tmp_path / f"{value}"
        written = saver.save(state, Job(path, Label(sequence=int(value)), replaces))
        state["state_dict"]["w"].fill_(-1.0)
        size, _ = written.result(DEADLINE)
        replaces = (path,)

        assert read_manifest(path).files["state.pth"].bytes == size
        assert read_manifest(path).sequence == value
        assert_same(load_checkpoint(path), value)
    saver.close()
    assert os.listdir(tmp_path) == [path.name]


def test_the_process_writes_what_was_copied_later(make_saver: Make, late: Late, tmp_path: Path) -> None:
    """The process gets a state once its late copy is complete."""
    saver, state = make_saver(no_thread, process=True), a_state(1.0)
    written = saver.save(state, Job(tmp_path / "a"), later=lambda: pointers(state))
    assert late.entered.wait(DEADLINE)
    late.go.set()
    saver.join()
    state["state_dict"]["w"].fill_(-1.0)
    written.result(DEADLINE)

    assert_same(load_checkpoint(tmp_path / "a"), 1.0)


def test_the_last_save_starts_no_process(make_saver: Make, tmp_path: Path) -> None:
    """The save at the end of a run, when the training does nothing else, is written by a thread."""
    saver = make_saver(process=True)
    saver.save(a_state(1.0), Job(tmp_path / "a", last=True)).result(DEADLINE)

    assert saver.process is None
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)


# --- its needs ---------------------------------------------------------------------------------------------


def test_it_imports_only_the_standard_library() -> None:
    """The process imports no torch and no msgspec, so that it starts in a twentieth of a second."""
    python, *rest = bare_command("eventloop.checkpoint.saving.saver_process", "1")
    command = [python, "-X", "importtime", *rest]
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)

    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in ran.stderr.splitlines()[1:]}
    assert "eventloop" in imported
    assert imported - {*sys.stdlib_module_names, "org"} == {"eventloop"}  # pickle looks for Jython's "org"


def test_without_shared_memory_there_is_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread writes on a system without memory that a process could map."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    saver = Saver()
    saver.save(a_state(1.0), Job(tmp_path / "a")).result(DEADLINE)
    saver.close()

    assert saver.process is None
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)


def test_a_process_that_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread writes and the log says why at each of a few starts; no descriptor stays open."""
    descriptors: list[int] = []

    def refused(*arguments: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refused)
    saver = Saver()
    for value in range(STARTS + 1):
        saver.save(a_state(float(value)), Job(tmp_path / f"{value}")).result(DEADLINE)
        descriptors.append(len(os.listdir("/proc/self/fd")))
    saver.close()

    assert len({*descriptors}) == 1
    assert_same(load_checkpoint(tmp_path / "3"), 3.0)
    why = "no process could be started: [Errno 11] Resource temporarily unavailable"
    assert warned(caplog) == [f"a checkpoint is written by a thread, because {why}"] * STARTS


def test_without_memory_to_share_a_thread_writes(
    make_saver: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If no shared memory can be allocated, a thread writes, and the log says so once."""
    nothing_is_small(monkeypatch)
    saver = make_saver(process=True)

    def refused(descriptor: int, size: int) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(os, "truncate", refused)
    for value in (1.0, 2.0):
        saver.save(a_state(value), Job(tmp_path / f"{value}")).result(DEADLINE)

    assert_same(load_checkpoint(tmp_path / "2.0"), 2.0)
    why = "no memory could be shared with a process: OSError: [Errno 27] File too large"
    assert warned(caplog) == [f"checkpoints are written by a thread, as {why}"]


@pytest.mark.parametrize("process", [False, True])
def test_a_state_that_cannot_be_copied_is_a_failed_save(
    make_saver: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, process: bool
) -> None:
    """An error of the copy fails that save, and the next save works."""
    nothing_is_small(monkeypatch)
    saver = make_saver(process=process)

    def copies_nothing(views: object, sources: object, *, non_blocking: bool) -> None:
        raise NotImplementedError("could not run 'aten::_foreach_copy_'")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "_foreach_copy_", copies_nothing)
        failed = saver.save({"w": torch.ones(3)}, Job(tmp_path / "a"))

    with pytest.raises(NotImplementedError, match="could not run 'aten::_foreach_copy_'"):
        failed.result(DEADLINE)
    saver.save(a_state(1.0), Job(tmp_path / "b")).result(DEADLINE)
    assert_same(load_checkpoint(tmp_path / "b"), 1.0)


# --- its end -----------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(make_saver: Make, tmp_path: Path) -> Iterator[tuple[Saver, SaverProcess]]:
    """Return a saver whose process has written once and is stopped by SIGSTOP."""
    saver = make_saver(process=True)
    saver.save(a_state(0.0), Job(tmp_path / "zero")).result(DEADLINE)
    assert saver.process is not None
    process = saver.process
    os.kill(process.pid, signal.SIGSTOP)
    yield saver, process
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGCONT)


@pytest.mark.parametrize("small", [True, False])
def test_a_killed_process_loses_no_save(
    stopped: tuple[Saver, SaverProcess],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    small: bool,
) -> None:
    """If the process is killed, a thread repeats its save and removes its files; the next save starts another
    process."""
    if not small:
        nothing_is_small(monkeypatch)
    saver, process = stopped
    begun = [tmp_path / f".{name}.{process.pid}-1.{end}" for name, end in (("a", "tmp"), ("zero", "old"))]
    for path in begun:
        path.mkdir()
    first = saver.save(a_state(1.0), Job(tmp_path / "a", replaces=(tmp_path / "zero",)))
    os.kill(process.pid, signal.SIGKILL)
    first.result(DEADLINE)
    saver.save(a_state(2.0), Job(tmp_path / "b")).result(DEADLINE)

    assert warned(caplog) == [
        "a checkpoint is written by a thread, because the process could not: it ended: killed by SIGKILL"
    ]
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)
    assert saver.process is not None
    assert saver.process.pid != process.pid


def test_a_stopped_process_is_killed(
    stopped: tuple[Saver, SaverProcess],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that gives no sign of life is killed, and a thread repeats its save."""
    monkeypatch.setattr(saver_client, "SILENT_SECONDS", 0.5)
    own, process = stopped
    state = {**a_state(1.0), "text": "x" * (1 << 22)}
    own.save(state, Job(tmp_path / "a")).result(DEADLINE)

    assert "the process could not: it gave no sign of life for 0.5 s, and was killed" in caplog.text
    assert not Path(f"/proc/{process.pid}").exists()
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)


def test_a_process_that_always_dies_is_started_a_few_times(tmp_path: Path) -> None:
    """A process that dies after every save is started at most `STARTS` times."""
    saver = Saver()
    seen = set()
    for number in range(STARTS + 2):
        saver.save(a_state(float(number)), Job(tmp_path / f"{number}")).result(DEADLINE)
        if saver.process is not None:
            seen.add(saver.process.pid)
            os.kill(saver.process.pid, signal.SIGKILL)
    saver.close()

    assert len(seen) <= STARTS
    assert_same(load_checkpoint(tmp_path / f"{STARTS + 1}"), STARTS + 1.0)


def test_an_error_of_the_process_is_the_error_of_the_save(make_saver: Make, tmp_path: Path) -> None:
    """If neither the process nor the thread can write a save, its promise raises the error, and the next save
    works."""
    saver = make_saver(process=True)
    (tmp_path / "file").touch()

    with pytest.raises(OSError, match="file"):
        saver.save(a_state(1.0), Job(tmp_path / "file" / "a")).result(DEADLINE)
    saver.save(a_state(2.0), Job(tmp_path / "b")).result(DEADLINE)

    assert_same(load_checkpoint(tmp_path / "b"), 2.0)


class FirstFails(SaverProcess):
    """A process whose first save of each group of several fails, as on a disk that was full for a moment."""

    def commit(self, saves: Sequence[AnySave]) -> list[Outcome]:
        """Let the process write all saves but the first."""
        if len(saves) == 1:
            return super().commit(saves)
        return [Outcome(error=OSError("no space left on device")), *super().commit(saves[1:])]


@pytest.fixture
def held(make_saver: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saver:
    """Return a saver whose process is stopped in a save, so that the next saves are one group; the first of them fails."""
    monkeypatch.setattr("eventloop.checkpoint.saving.group_writer.SaverProcess", FirstFails)
    saver = make_saver(process=True)
    saver.save(a_state(0.0), Job(tmp_path / "0")).result(DEADLINE)
    assert saver.process is not None
    os.kill(saver.process.pid, signal.SIGSTOP)
    begun = saver.save(a_state(1.0), Job(tmp_path / "1"))
    until(lambda: any(task.begun for task in saver._tasks if task.written is begun))
    return saver


def let_go(saver: Saver) -> None:
    """Let the process of `held` go on once two saves wait, and wait for all saves and removals."""
    until(lambda: len(saver.waiting) == 2)
    assert saver.process is not None
    os.kill(saver.process.pid, signal.SIGCONT)
    saver.close()


def test_a_save_that_a_thread_repeats_is_replaced_by_the_one_after_it(held: Saver, tmp_path: Path) -> None:
    """Of a group whose first save fails in the process, only as many checkpoints are kept as without the failure."""
    first = held.save(a_state(2.0), Job(tmp_path / "2", replaces=(tmp_path / "0", tmp_path / "1"), spares=1))
    after = (tmp_path / "0", tmp_path / "1", tmp_path / "2")
    held.save(a_state(3.0), Job(tmp_path / "3", replaces=after, spares=1))
    let_go(held)

    first.result(DEADLINE)
    assert sorted(os.listdir(tmp_path)) == ["2", "3"]
    assert_same(load_checkpoint(tmp_path / "2"), 2.0)


def test_a_save_that_failed_does_not_take_the_name_of_a_later_one(held: Saver, tmp_path: Path) -> None:
    """If the later one of two saves of one name is durable, the earlier one is not written over it."""
    first = held.save(a_state(2.0), Job(tmp_path / "best"))
    held.save(a_state(3.0), Job(tmp_path / "best"))
    let_go(held)

    with pytest.raises(OSError, match="no space left"):
        first.result(DEADLINE)
    assert_same(load_checkpoint(tmp_path / "best"), 3.0)


@pytest.mark.parametrize("moment", ["while it starts", "when it runs"])
def test_it_ignores_what_ends_a_process_group(moment: str, tmp_path: Path) -> None:
    """The process ignores Ctrl-C and the schedulers' signals, from its start on."""
    process = SaverProcess()
    save = serialize(a_state(1.0), tmp_path / "a").with_own_bytes()
    if moment == "when it runs":
        assert process.commit([save])[0].error is None
    for name in KNOWN:
        os.kill(process.pid, getattr(signal, name))

    (outcome,) = process.commit([save._replace(path=tmp_path / "b")])
    assert outcome.error is None
    assert process.end(DEADLINE) == "exit code 0"
    assert_same(load_checkpoint(tmp_path / "b"), 1.0)


LEAVES_A_FORK = """
import os, signal
from eventloop.checkpoint.saving.saver_client import SaverProcess

os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
process = SaverProcess()
assert process.commit([]) == []
fork = os.fork()
if fork:
    print(process.pid, fork, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
os.close(1)
while True:
    signal.pause()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux's pidfd_open")
def test_it_ends_with_the_training_though_a_fork_lives_on(tmp_path: Path) -> None:
    """The process ends with the training even if a forked child of the training lives on."""
    ran = forked.run(["-c", LEAVES_A_FORK], cwd=tmp_path)

    process, fork = map(int, ran.stdout.split())
    try:
        with suppress(ProcessLookupError):  # it has ended already
            descriptor = os.pidfd_open(process)
            try:
                assert select.select([descriptor], [], [], DEADLINE)[0]
            finally:
                os.close(descriptor)
    finally:
        os.kill(fork, signal.SIGKILL)
