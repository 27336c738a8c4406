"""Files that only grow: what a kill left of a last line is removed, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from eventloop.util.append_file import cut_torn_line, open_appending, replacing, write_all


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines"


@pytest.fixture
def descriptor(path: Path) -> Iterator[int]:
    """Of the file, to read and to write."""
    path.write_bytes(b"one\ntw")
    opened = os.open(path, os.O_RDWR)
    yield opened
    os.close(opened)


def test_a_torn_line_is_cut(path: Path, descriptor: int) -> None:
    """It is what is returned."""
    assert cut_torn_line(descriptor, lambda line: line == b"tw") == b"tw"
    assert path.read_bytes() == b"one\n"
    assert cut_torn_line(descriptor, bool) == b""


def test_a_line_that_another_program_goes_on_with_is_not_torn(path: Path, descriptor: int) -> None:
    """What came between the look and the cut is not lost."""
    seen = []

    def is_torn(line: bytes) -> bool:
        seen.append(line)
        with open(path, "ab") as other:
            other.write(b"o\nthr" if len(seen) == 1 else b"ee\n")
        return True

    assert cut_torn_line(descriptor, is_torn) == b""
    assert seen == [b"tw", b"thr"]
    assert path.read_bytes() == b"one\ntwo\nthree\n"


def test_a_file_that_may_only_grow(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its torn line is ended, so that the next one stands alone."""
    path.write_bytes(b"one\ntw")

    def refused(descriptor: int, size: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.ftruncate", refused)
    open_appending(path, bool).close()

    assert path.read_bytes() == b"one\ntw\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_disk_that_is_full_is_told_with_the_file() -> None:
    """The error of a write says which file it was: a run has several, on several disks."""
    with (
        FileIO("/dev/full", "wb") as file,
        pytest.raises(OSError, match="No space left on device: '/dev/full'"),
    ):
        write_all(file, b"a line\n")


@pytest.mark.parametrize("left", ["file", "link", "dangling link"])
def test_a_file_is_replaced_through_no_link(path: Path, left: str) -> None:
    """What is found under the name of the unfinished file, a killed process's or a link that another put there, goes."""
    unfinished, other = path.with_name(f".{path.name}.{os.getpid()}.tmp"), path.with_name("other")
    if left == "file":
        unfinished.write_bytes(b"half")
    else:
        unfinished.symlink_to(other)
    if left != "dangling link":
        other.write_bytes(b"other")

    with replacing(path, durable=False) as file:
        file.write(b"whole")

    assert path.read_bytes() == b"whole"
    assert not path.is_symlink()
    assert (other.read_bytes() if other.exists() else b"") == (b"" if left == "dangling link" else b"other")
