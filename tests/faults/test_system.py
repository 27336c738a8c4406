"""What the operations ask of the system; everything else is tested above them."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from eventloop.checkpoint.commit import commit
from eventloop.checkpoint.disk import DISK, LARGE, Sink
from eventloop.checkpoint.serialize import serialize
from tests.faults.operations import save, state, value_of, values
from tests.faults.shim import Operation, shimmed


def sync(directory: Path, kind: str) -> int:
    """Sync a file or a directory; return its number."""
    if kind == "directory":
        DISK.sync_directory(directory)
        return directory.stat().st_ino
    with DISK.create(directory / "file") as file:
        DISK.sync(file)
        return os.fstat(file.fileno()).st_ino


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_the_system_is_asked_to_sync(directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Bytes of a file, and names of a directory, are made durable."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))

    number = sync(directory, kind)

    assert synced == [number]


@pytest.mark.parametrize(
    ("kind", "code", "fails"),
    [
        ("file", "EINVAL", True),
        ("directory", "EIO", True),
        ("directory", "EINVAL", False),  # some file systems on a network have no such thing
        ("directory", "ENOTSUP", False),
    ],
)
def test_a_sync_that_fails(
    directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str, code: str, fails: bool
) -> None:
    """Is an error, unless the system cannot sync directories."""
    error = OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    def refuse(file: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=error.strerror) if fails else nullcontext():
        sync(directory, kind)


def test_what_is_written_is_not_read_later(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a large piece is written its memory is the caller's: it was hashed by then."""

    class Slow(threading.Thread):
        """Hashes only when it is waited for."""

        def start(self) -> None:
            pass

        def join(self, timeout: float | None = None) -> None:
            self.run()

    data = bytearray(b"a" * LARGE)
    with DISK.create(directory / "one") as file, DISK.create(directory / "other") as other:
        expected, sink = Sink(DISK, other), Sink(DISK, file)
        expected.write(bytes(data))
        monkeypatch.setattr("eventloop.checkpoint.disk.threading.Thread", Slow)
        sink.write(memoryview(data))
        data[:] = b"b" * LARGE

    assert sink.entry() == expected.entry()


def test_what_another_run_has_saved_is_not_removed(directory: Path) -> None:
    """A name that was taken while the save was under way: it fails, and what has the name is left."""
    path = directory / "iter_1"

    def taken(operation: Operation) -> Any:
        if operation.name == "rename" and operation.target == path and not path.exists():
            save(directory / "theirs", 7)
            os.rename(directory / "theirs", path)
        return operation.do()

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
    monkeypatch.setattr("eventloop.temporary.names._numbers", iter(range(1, 9)))

    save(path, 1)

    assert value_of(path) == 1
