"""What the operations ask of the system; everything else is tested above them."""

from __future__ import annotations

import errno
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from eventloop.checkpoint.commit import commit
from eventloop.checkpoint.disk import BESIDE, DISK, Sink
from eventloop.checkpoint.serialize import serialize
from tests.faults.operations import save, state, value_of, values
from tests.faults.shim import Operation, shimmed


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the files, and directories, that the system is asked to sync."""
    numbers: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: numbers.append(os.fstat(file).st_ino))
    return numbers


def test_a_file_is_synced(directory: Path, synced: list[int]) -> None:
    """The system is asked to make its bytes durable."""
    with DISK.create(directory / "file") as file:
        DISK.sync(file)

    assert synced == [(directory / "file").stat().st_ino]


def test_a_directory_is_synced(directory: Path, synced: list[int]) -> None:
    """The system is asked to make its names durable."""
    DISK.sync_directory(directory)

    assert synced == [directory.stat().st_ino]


def refuse(number: int) -> Any:
    """An fsync that fails."""

    def fsync(file: int) -> None:
        raise OSError(number, os.strerror(number))

    return fsync


@pytest.mark.parametrize("code", ["EINVAL", "ENOTSUP"])
def test_a_directory_that_cannot_be_synced_is_no_failure(
    directory: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """Some file systems on a network have no such thing; a checkpoint can be saved on them all the same."""
    monkeypatch.setattr(os, "fsync", refuse(getattr(errno, code)))

    DISK.sync_directory(directory)


def test_a_file_that_cannot_be_synced_is_a_failure(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of its bytes."""
    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))

    with DISK.create(directory / "file") as file, pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        DISK.sync(file)


def test_a_directory_that_fails_to_sync_is_a_failure(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the disk is told."""
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))

    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        DISK.sync_directory(directory)


def test_what_is_written_is_not_read_later(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a large piece is written its memory is the caller's: it was hashed by then."""

    class Later(Future[None]):
        """Done when it is asked for."""

        def __init__(self, work: Any, piece: memoryview) -> None:
            super().__init__()
            self.work, self.piece = work, piece

        def result(self, timeout: float | None = None) -> None:
            self.work(self.piece)

    class Slow:
        """Does nothing of its own accord."""

        def submit(self, work: Any, piece: memoryview) -> Later:
            return Later(work, piece)

    data = bytearray(b"a" * BESIDE)
    with DISK.create(directory / "one") as file, DISK.create(directory / "other") as other:
        expected, sink = Sink(DISK, other), Sink(DISK, file)
        monkeypatch.setattr(sink, "_hasher", Slow())
        expected.write(bytes(data))
        expected.close()
        sink.write(memoryview(data))
        data[:] = b"b" * BESIDE

    assert sink.entry() == expected.entry()


def test_what_another_run_has_saved_is_not_removed(directory: Path) -> None:
    """A name that was taken while the save was under way: it fails, and what has the name is left."""
    path = directory / "iter_1"

    def taken(operation: Operation) -> Any:
        if operation.name == "rename" and operation.target == path and not path.exists():
            save_beside(path)
        return operation.do()

    def save_beside(path: Path) -> None:
        save(directory / "theirs", 7)
        os.rename(directory / "theirs", path)

    with shimmed(taken), pytest.raises(OSError, match="not empty"):
        save(path, 1)

    assert values(directory) == {"iter_1": 7}


def test_nothing_is_removed_for_a_save_that_fails(directory: Path) -> None:
    """What it was to replace is there until it is durable."""
    save(directory / "iter_1", 1)
    replaces = (directory / "iter_1",)
    saving = serialize(state(2), directory / "iter_2")._replace(replaces=replaces)

    def full(operation: Operation) -> Any:
        if operation.name == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return operation.do()

    with shimmed(full):
        (outcome,) = commit([saving])
    assert isinstance(outcome.error, OSError)
    assert outcome.error.errno == errno.ENOSPC
    assert values(directory) == {"iter_1": 1}

    commit([saving])
    assert values(directory) == {"iter_2": 2}


def test_a_killed_save_of_the_same_process_number_is_in_nobodys_way(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container every run is process 1, and counts from 1."""
    path = directory / "iter_1"
    for number in (1, 2):
        left = directory / f".iter_1.{os.getpid()}-{number}.tmp"
        left.mkdir()
        (left / "state.pth").write_bytes(b"half")
    monkeypatch.setattr("eventloop.checkpoint.commit._numbers", iter(range(1, 9)))

    save(path, 1)

    assert value_of(path) == 1
