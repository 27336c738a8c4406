"""The saver: a thread at first, a process in a longer run, and nothing lost between them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop.checkpoint import load_checkpoint, save_checkpoint
from eventloop.saver import Saver, SaverProcess
from eventloop.snapshot import Snapshot

needs_shared_memory = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd_create")


def a_state(value: float) -> dict[str, Any]:
    return {
        "meta": {"iter": int(value), "names": ["a", "b"], "pair": (1, 2.5), "nothing": None},
        "state_dict": {
            "w": torch.full((3, 4), value),
            "n": torch.tensor(int(value)),
            "empty": torch.empty(0),
        },
        "optimizer": {"state": {0: {"momentum": torch.full((12,), -value)}}},
    }


@pytest.fixture
def saver_with_process() -> Iterator[Callable[[], Saver]]:
    """Makes savers whose process is ready."""
    made: list[Saver] = []

    def make() -> Saver:
        saver = Saver(save_checkpoint, start_after=0.0)
        made.append(saver)
        saver.start_process(a_state(0.0))
        assert saver.process is not None
        assert saver.process.wait_ready(60)
        return saver

    yield make
    for saver in made:
        saver.close()


def assert_same(loaded: dict[str, Any], value: float) -> None:
    expected = a_state(value)
    assert loaded["meta"] == expected["meta"]
    for name, tensor in expected["state_dict"].items():
        assert torch.equal(loaded["state_dict"][name], tensor), name
    assert torch.equal(
        loaded["optimizer"]["state"][0]["momentum"], expected["optimizer"]["state"][0]["momentum"]
    )


def test_young_saver_writes_on_a_thread(tmp_path: Path) -> None:
    """A run that has just begun starts no process."""
    saver = Saver(save_checkpoint)

    saver.save(a_state(1.0), tmp_path / "a.pth").result(30)
    saver.close()

    assert saver.process is None
    assert_same(load_checkpoint(tmp_path / "a.pth"), 1.0)


@needs_shared_memory
def test_process_writes_what_the_state_was(saver_with_process: Callable[[], Saver], tmp_path: Path) -> None:
    """The file holds the state at the call, whatever is done to it while the process writes."""
    saver = saver_with_process()
    for value in (1.0, 2.0, 3.0):
        state = a_state(value)
        written = saver.save(state, tmp_path / f"{value}.pth")
        state["state_dict"]["w"].fill_(-1.0)
        size, _ = written.result(30)

        assert size == (tmp_path / f"{value}.pth").stat().st_size
        assert_same(load_checkpoint(tmp_path / f"{value}.pth"), value)


@needs_shared_memory
def test_killed_process_loses_no_save(saver_with_process: Callable[[], Saver], tmp_path: Path) -> None:
    """When the process is killed, the save it was given and the next ones are written by the thread."""
    saver = saver_with_process()
    assert saver.process is not None
    os.kill(saver.process.pid, signal.SIGSTOP)
    first = saver.save(a_state(1.0), tmp_path / "first.pth")
    os.kill(saver.process.pid, signal.SIGKILL)

    first.result(30)
    saver.save(a_state(2.0), tmp_path / "second.pth").result(30)

    assert_same(load_checkpoint(tmp_path / "first.pth"), 1.0)
    assert_same(load_checkpoint(tmp_path / "second.pth"), 2.0)


@needs_shared_memory
def test_error_of_the_process_is_the_error_of_the_save(
    saver_with_process: Callable[[], Saver], tmp_path: Path
) -> None:
    """What neither the process nor the thread can write is an error, and the next save works."""
    saver = saver_with_process()
    (tmp_path / "file").touch()

    with pytest.raises(OSError, match="file"):
        saver.save(a_state(1.0), tmp_path / "file" / "a.pth").result(30)
    saver.save(a_state(2.0), tmp_path / "b.pth").result(30)

    assert_same(load_checkpoint(tmp_path / "b.pth"), 2.0)


@needs_shared_memory
def test_process_outlives_ctrl_c_and_ends_with_its_parent(saver_with_process: Callable[[], Saver]) -> None:
    """SIGINT and SIGTERM to the group do not end it; the end of its input does."""
    saver = saver_with_process()
    process = saver.process
    assert process is not None
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGTERM)

    assert process.ready
    saver.close()

    assert process.exit_code == 0


@needs_shared_memory
def test_shared_memory_has_no_name() -> None:
    """Nothing is left behind under a name, however the processes end."""
    before = set(os.listdir("/dev/shm"))
    snapshot = Snapshot(shared=True)
    snapshot.pack(a_state(1.0))

    assert set(os.listdir("/dev/shm")) == before


def test_snapshot_reuses_its_buffers() -> None:
    """The second snapshot of one layout lies where the first lay."""
    snapshot = Snapshot()
    first = snapshot.take(a_state(1.0))["state_dict"]["w"]
    second = snapshot.take(a_state(2.0))["state_dict"]["w"]

    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(second, torch.full((3, 4), 2.0))


def test_saver_process_without_a_parent_message_ends() -> None:
    """Closing a process that was never given anything ends it."""
    process = SaverProcess()
    process.close()

    assert process.exit_code == 0
