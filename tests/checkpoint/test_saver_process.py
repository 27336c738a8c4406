"""The process that writes checkpoints in a longer run."""

from __future__ import annotations

import functools
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from eventloop.checkpoint import load_checkpoint
from eventloop.checkpoint.manifest import Label, read_manifest
from eventloop.checkpoint.saving.saver import Saver, SaveReplacedError
from eventloop.checkpoint.saving.saver_client import Job, ProcessGoneError, SaverProcess
from eventloop.checkpoint.saving.snapshot import Snapshot
from eventloop.hooks.preemption import KNOWN
from tests import forked
from tests.support.saving import DEADLINE, Gate, Late, a_state, assert_same, nothing_is_small, pointers, write

needs_shared_memory = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd_create")

Make = Callable[..., Saver]


@pytest.fixture(scope="module")
def ready() -> Iterator[SaverProcess]:
    """One for all tests that leave it as it was."""
    process = SaverProcess()
    assert process.wait_ready(DEADLINE)
    yield process
    process.close()


@pytest.fixture
def with_process(
    monkeypatch: pytest.MonkeyPatch, ready: SaverProcess, make_saver: Make
) -> Callable[..., Saver]:
    """Make a saver that is given that process, and does not end it."""
    monkeypatch.setattr("eventloop.checkpoint.saving.saver.SaverProcess", lambda: ready)
    monkeypatch.setattr(ready, "close", lambda: None)
    return functools.partial(make_saver, process=True)


@pytest.mark.slow
@needs_shared_memory
def test_process_writes_what_the_state_was(with_process: Make, tmp_path: Path) -> None:
    """The checkpoint holds the state at the call, whatever is done to it while the process writes; the process
    removes what it replaces."""
    saver = with_process(lambda state, job, given_up: pytest.fail("the thread wrote"))
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
        assert os.listdir(tmp_path) == [path.name]


@pytest.mark.slow
@needs_shared_memory
def test_process_writes_what_was_copied_later(with_process: Make, late: Late, tmp_path: Path) -> None:
    """It is given the state when all of it is there."""
    saver, state = with_process(), a_state(1.0)
    written = saver.save(state, Job(tmp_path / "a"), later=lambda: pointers(state))
    assert late.entered.wait(DEADLINE)
    late.go.set()
    saver.join()
    state["state_dict"]["w"].fill_(-1.0)
    written.result(DEADLINE)

    assert_same(load_checkpoint(tmp_path / "a"), 1.0)


@needs_shared_memory
def test_killed_process_loses_no_save(
    make_saver: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When the process is killed, the save it was given and the next ones are written by the thread, and what it had
    begun is removed."""
    saver = make_saver(process=True)
    assert saver.process is not None
    os.kill(saver.process.pid, signal.SIGSTOP)
    begun = tmp_path / f".first.{saver.process.pid}-1.tmp"
    begun.mkdir()
    first = saver.save(a_state(1.0), Job(tmp_path / "first"))
    os.kill(saver.process.pid, signal.SIGKILL)

    first.result(DEADLINE)
    saver.save(a_state(2.0), Job(tmp_path / "second")).result(DEADLINE)

    assert "a checkpoint is written by a thread, because the process could not: it " in caplog.text
    assert not begun.exists()
    assert_same(load_checkpoint(tmp_path / "first"), 1.0)
    assert_same(load_checkpoint(tmp_path / "second"), 2.0)


@pytest.mark.slow
@needs_shared_memory
def test_error_of_the_process_is_the_error_of_the_save(with_process: Make, tmp_path: Path) -> None:
    """What neither the process nor the thread can write is an error, and the next save works."""
    saver = with_process()
    (tmp_path / "file").touch()

    with pytest.raises(OSError, match="file"):
        saver.save(a_state(1.0), Job(tmp_path / "file" / "a")).result(DEADLINE)
    saver.save(a_state(2.0), Job(tmp_path / "b")).result(DEADLINE)

    assert_same(load_checkpoint(tmp_path / "b"), 2.0)


def test_a_young_process_is_not_waited_for() -> None:
    """A run that ends while the process is still importing torch ends it at once: it was given nothing."""
    process = SaverProcess()

    process.close()

    assert process.exit_code == -signal.SIGKILL


@pytest.mark.slow
def test_a_process_that_is_done_exits_well() -> None:
    """One that was ready ends by itself when it is told to."""
    process = SaverProcess()
    assert process.wait_ready(DEADLINE)

    process.close()

    assert process.exit_code == 0


@pytest.mark.slow
def test_process_outlives_ctrl_c_and_ends_with_its_parent() -> None:
    """What a run may be told to end by reaches the group, and does not end it, from its first moment on; the end of its
    input does."""
    process = SaverProcess()
    for _ in ("while it imports", "when it is ready"):
        for name in KNOWN:
            os.kill(process.pid, getattr(signal, name))
        assert process.wait_ready(DEADLINE)

    process.close()

    assert process.exit_code == 0


@pytest.mark.slow
@needs_shared_memory
def test_a_process_that_is_gone(make_saver: Make, tmp_path: Path) -> None:
    """Asked to save it says that it is gone, or that it died over it."""
    saver = make_saver(process=True)
    process = saver.process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    packed = Snapshot(shared=True).pack(a_state(1.0))

    with pytest.raises(ProcessGoneError, match=r"^it (died|has ended)$"):
        process.save(packed, Job(tmp_path / "a"))


@pytest.mark.slow
@needs_shared_memory
def test_process_writes_a_sparse_tensor(with_process: Make, tmp_path: Path) -> None:
    """It is no part of the shared memory, and comes with what is said of it."""
    saver = with_process(lambda state, job, given_up: pytest.fail("the thread wrote"))
    state = {"meta": {}, "state_dict": {"s": torch.eye(4).to_sparse().coalesce(), "w": torch.ones(3)}}
    written = saver.save(state, Job(tmp_path / "a"))
    state["state_dict"]["s"].values().zero_()
    written.result(DEADLINE)

    loaded = load_checkpoint(tmp_path / "a")["state_dict"]
    assert torch.equal(loaded["s"].to_dense(), torch.eye(4))
    assert torch.equal(loaded["w"], torch.ones(3))


@needs_shared_memory
def test_an_old_saver_starts_its_process(tmp_path: Path) -> None:
    """A save of a run that has lasted a while starts it, and does not wait for it."""
    saver = Saver(write, start_after=0.0)
    saver.save(a_state(1.0), Job(tmp_path / "a")).result(DEADLINE)
    process = saver.process
    saver.close()

    assert process is not None
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)


@pytest.mark.slow
@needs_shared_memory
def test_it_starts_while_a_save_is_under_way(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a slow disk and spare buffers there may be one at any time. The one being written keeps its buffers."""
    monkeypatch.setattr("eventloop.checkpoint.saving.saver.SMALL", 0)
    saver = Saver(gate.write, start_after=None, spare=True)
    first = saver.save(a_state(1.0), Job(tmp_path / "a"))
    assert gate.entered.wait(DEADLINE)
    saver._start_after = 0.0  # it is old now

    second = saver.save(a_state(2.0), Job(tmp_path / "b"))

    process = saver.process
    assert process is not None
    assert process.wait_ready(60)
    third = saver.save(a_state(3.0), Job(tmp_path / "c"))  # the process can see this one's buffers
    gate.open.set()
    for written in (first, third):
        written.result(DEADLINE)
    assert isinstance(second.exception(), SaveReplacedError)
    saver.close()
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)
    assert_same(load_checkpoint(tmp_path / "c"), 3.0)


def test_without_shared_memory_there_is_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process could not see the copies, the thread writes for good."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    saver = Saver(write, start_after=0.0)
    saver.save(a_state(1.0), Job(tmp_path / "a")).result(DEADLINE)
    saver.close()

    assert saver.process is None
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)


@pytest.mark.slow
@needs_shared_memory
def test_a_save_that_is_waited_for_is_written_here(with_process: Make, tmp_path: Path) -> None:
    """The process takes only time that nobody else wants, and who waits may not have so much of it."""
    saver = with_process()
    assert saver.process is not None
    os.kill(saver.process.pid, signal.SIGSTOP)

    saver.save(a_state(1.0), Job(tmp_path / "a", awaited=True)).result(DEADLINE)

    os.kill(saver.process.pid, signal.SIGCONT)
    assert_same(load_checkpoint(tmp_path / "a"), 1.0)


# --- what cannot be had ------------------------------------------------------------------------------------


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings so far."""
    return [record.getMessage() for record in caplog.records if record.name == "eventloop"]


@needs_shared_memory
def test_a_process_that_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit of processes, or a sandbox, costs neither the save nor the training: a thread writes, which the log says at
    each of a few tries; no descriptor is left open."""
    monkeypatch.setattr("eventloop.checkpoint.saving.saver.STARTS", 2)
    saver = Saver(write, start_after=0.0)
    descriptors: list[int] = []

    def refused(*arguments: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("eventloop.checkpoint.saving.saver_client.subprocess.Popen", refused)
    for value in (1.0, 2.0, 3.0):
        saver.save(a_state(value), Job(tmp_path / f"{value}")).result(DEADLINE)
        descriptors.append(len(os.listdir("/proc/self/fd")))
    saver.close()

    assert len({*descriptors}) == 1
    assert_same(load_checkpoint(tmp_path / "3.0"), 3.0)
    why = "no process could be started: [Errno 11] Resource temporarily unavailable"
    assert told(caplog) == [f"a checkpoint is written by a thread, because {why}"] * 2


@pytest.mark.parametrize("executable", ["", None])
def test_a_program_without_an_interpreter_has_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    """Python within another program knows of none that could be started."""
    monkeypatch.setattr("sys.executable", executable)
    saver = Saver(write, start_after=0.0)
    saver.save(a_state(1.0), Job(tmp_path / "a")).result(DEADLINE)
    saver.close()

    assert saver.process is None


def test_a_frozen_program_is_not_started_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its executable is no interpreter, but the program that trains."""
    monkeypatch.setattr("sys.frozen", True, raising=False)
    saver = Saver(write, start_after=0.0)
    saver.save(a_state(1.0), Job(tmp_path / "a")).result(DEADLINE)
    saver.close()

    assert saver.process is None


@needs_shared_memory
def test_without_memory_to_share_a_thread_writes(
    with_process: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit of files' sizes counts for it too. It is said once; what is saved from then on lies in memory of the
    training's own."""
    saver = with_process()

    def refused(descriptor: int, size: int) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(os, "truncate", refused)
    for value in (1.0, 2.0):
        saver.save(a_state(value), Job(tmp_path / f"{value}")).result(DEADLINE)

    assert_same(load_checkpoint(tmp_path / "2.0"), 2.0)
    why = "no memory could be shared with a process: OSError: [Errno 27] File too large"
    assert told(caplog) == [f"checkpoints are written by a thread, as {why}"]


@pytest.mark.slow
@needs_shared_memory
@pytest.mark.parametrize("process", [False, True])
def test_a_state_that_cannot_be_copied_is_a_failed_save(
    with_process: Make, make_saver: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, process: bool
) -> None:
    """The training goes on, and so does the saver, with its process if it has one."""
    nothing_is_small(monkeypatch)
    saver = with_process() if process else make_saver()

    def copies_nothing(views: object, sources: object, *, non_blocking: bool) -> None:
        raise NotImplementedError("could not run 'aten::_foreach_copy_'")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "_foreach_copy_", copies_nothing)
        failed = saver.save({"w": torch.ones(3)}, Job(tmp_path / "a"))

    with pytest.raises(NotImplementedError, match="could not run 'aten::_foreach_copy_'"):
        failed.result(DEADLINE)

    saver.save(a_state(1.0), Job(tmp_path / "b")).result(DEADLINE)
    assert_same(load_checkpoint(tmp_path / "b"), 1.0)
    assert saver._shared is process


# --- its surroundings --------------------------------------------------------------------------------------

WITHOUT_STREAMS = """
import os
from eventloop.checkpoint.saving.saver_client import SaverProcess

for number in (0, 1, 2):
    os.close(number)
process = SaverProcess()
ready = process.wait_ready(60)
process.close()
os._exit(0 if ready and process.exit_code == 0 else 1)
"""


@pytest.mark.slow
def test_what_is_printed_at_its_start_is_no_answer(tmp_path: Path) -> None:
    """A sitecustomize, or a plug-in of torch's, may print before any code of ours runs; and a program may have closed its
    standard streams."""
    (tmp_path / "sitecustomize.py").write_text("print('welcome to the cluster')\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), forked.ROOT])}

    ran = forked.run(["-c", WITHOUT_STREAMS], cwd=tmp_path, env=environment)

    assert ran.returncode == 0


LEAVES_A_FORK = """
import os, signal
from eventloop.checkpoint.saving.saver_client import SaverProcess

os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
process = SaverProcess()
assert process.wait_ready(60)
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
def test_a_fork_that_outlives_the_training_holds_no_process(tmp_path: Path) -> None:
    """The fork has the pipe too, so that no end of it tells the process that the training is gone."""
    ran = forked.run(["-c", LEAVES_A_FORK], cwd=tmp_path)

    process, fork = map(int, ran.stdout.split())
    try:
        with suppress(ProcessLookupError):  # it is gone by now
            descriptor = os.pidfd_open(process)
            try:
                assert select.select([descriptor], [], [], DEADLINE)[0]
            finally:
                os.close(descriptor)
    finally:
        os.kill(fork, signal.SIGKILL)
