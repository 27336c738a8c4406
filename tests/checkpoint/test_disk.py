"""Test durable writes of files and directories, and the hash that is computed meanwhile."""

from __future__ import annotations

import hashlib
import subprocess
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, cast

import pytest

from eventloop.checkpoint.disk import LARGE, PIECE, Disk, Sink, make_directories, write_file
from tests import no_threads
from tests.support.recording_disk import RecordingDisk

Run = Callable[..., subprocess.CompletedProcess[str]]


class Slow(Disk):
    """A disk that takes at most so many bytes in one call."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.writes: list[int] = []

    def write(self, file: FileIO, data: memoryview) -> int:
        self.writes.append(len(data))
        return super().write(file, data[: self.most])


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[Callable[..., Sink]]:
    """Return a function that makes sinks into one file."""
    files: list[FileIO] = []

    def make(disk: Disk | None = None, given_up: threading.Event | None = None) -> Sink:
        files.append(FileIO(tmp_path / "file", "xb"))
        return Sink(disk or Disk(), files[-1], given_up)

    yield make
    for file in files:
        file.close()


def pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


@pytest.mark.parametrize(
    "sizes", [(), (0,), (1, 2, 3), (LARGE,), (LARGE - 1, LARGE + 1), (PIECE + 3,), (10, 2 * LARGE, 10)]
)
def test_the_hash_is_that_of_the_file(
    sink: Callable[..., Sink], tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    """The hash is that of the file's bytes, for small pieces and for large ones that another thread
    hashes."""
    into = sink()
    data = [pattern(size) for size in sizes]

    assert [into.write(part) for part in data] == list(sizes)

    raw = (tmp_path / "file").read_bytes()
    assert raw == b"".join(data)
    assert (into.entry().bytes, into.entry().sha256) == (len(raw), hashlib.sha256(raw).hexdigest())


def test_short_writes_are_completed(sink: Callable[..., Sink], tmp_path: Path) -> None:
    """If the system takes fewer bytes than given, the rest is written by further calls; views count in
    bytes."""
    disk = Slow(4)
    into = sink(disk)

    assert into.write(cast(Any, memoryview(b"0123456789").cast("H"))) == 10

    assert (tmp_path / "file").read_bytes() == b"0123456789"
    assert disk.writes == [10, 6, 2]
    assert into.entry().sha256 == hashlib.sha256(b"0123456789").hexdigest()


@pytest.mark.parametrize("size", [1, LARGE])
def test_a_file_that_takes_nothing(sink: Callable[..., Sink], size: int) -> None:
    """A write call that takes no bytes is an error, and is not repeated forever."""
    into = sink(Slow(0))

    with pytest.raises(OSError, match="the file takes no more bytes"):
        into.write(pattern(size))


AT_EXIT = """
import atexit, hashlib, sys
from pathlib import Path
from eventloop.checkpoint.disk import LARGE, write_file
data = [bytes([i]) * (2 * LARGE) for i in range(3)]
def save():
    entry = write_file(Path("state"), lambda sink: [sink.write(part) for part in data])
    print(entry.bytes == 6 * LARGE, entry.sha256 == hashlib.sha256(b"".join(data)).hexdigest())
atexit.register(save)
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["", no_threads.AT_EXIT])
def test_a_file_that_is_written_at_the_exit(python: Run, tmp_path: Path, threads: str) -> None:
    """If no thread can be started at the interpreter's exit, data are hashed on the calling thread before
    they are written."""
    ran = python(AT_EXIT + threads)

    assert (ran.stdout, ran.stderr) == ("True True\n", "")


def test_a_piece_that_no_thread_hashes_is_hashed_once(
    sink: Callable[..., Sink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece for which no thread could be started is hashed once, also if threads can be started again
    later."""
    into = sink()
    with monkeypatch.context() as patched:
        no_threads.refuse(patched)
        into.write(pattern(LARGE))
    into.write(pattern(2 * LARGE))

    assert into.entry().sha256 == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()


def test_write_file(tmp_path: Path) -> None:
    """A file is synced before its size and hash are returned; an existing path is an error."""
    disk = RecordingDisk(tmp_path)
    entry = write_file(tmp_path / "file", lambda sink: sink.write(b"abc"), disk=disk)

    assert disk.calls == ["create file", "write file", "sync file"]
    assert (entry.bytes, entry.sha256) == (3, hashlib.sha256(b"abc").hexdigest())
    with pytest.raises(FileExistsError, match="file"):
        write_file(tmp_path / "file", lambda sink: sink.write(b"new"))
    assert (tmp_path / "file").read_bytes() == b"abc"


@pytest.mark.parametrize(
    ("there", "calls"),
    [
        (False, ["make a", "sync directory .", "make a/b", "sync directory a"]),
        (True, ["sync directory .", "sync directory a"]),
    ],
)
def test_make_directories(tmp_path: Path, there: bool, calls: list[str]) -> None:
    """Each directory is durable in its parent before the next one is made; existing ones are synced once
    too."""
    if there:
        (tmp_path / "a" / "b").mkdir(parents=True)
    disk = RecordingDisk(tmp_path)

    for _ in range(2):
        make_directories(tmp_path / "a" / "b", disk)

    assert disk.calls == calls


def test_a_directory_above_that_may_not_be_listed(tmp_path: Path) -> None:
    """A parent that this user may not list cannot be synced, and is skipped."""
    disk = RecordingDisk(tmp_path, 1, PermissionError)

    make_directories(tmp_path / "a", disk)

    assert (tmp_path / "a").is_dir()


def test_a_directory_that_somebody_else_makes(tmp_path: Path) -> None:
    """It is no error if another process makes the directory at the same moment."""
    disk = RecordingDisk(tmp_path)

    def make_first(call: str) -> None:
        if call == "make a":
            (tmp_path / "a").mkdir()

    disk.before = make_first
    make_directories(tmp_path / "a", disk)

    assert disk.calls == ["make a", "sync directory ."]
