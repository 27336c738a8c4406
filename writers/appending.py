"""A file that only grows, without a buffer of its own: what was written survives a kill of the process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO


def open_appending(path: Path) -> FileIO:
    """Open a file to append to, and make its folder. A last line that was cut short is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = FileIO(path, "ab+")
    try:
        if os.fstat(file.fileno()).st_size:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                write_all(file, b"\n")
    except BaseException:
        file.close()
        raise
    return file


def write_all(file: FileIO, data: bytes) -> None:
    """Write all of `data`: one system call, more only where the first one fell short."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A new file that takes the name `path` when the block ends. Whoever reads `path` meanwhile finds the old file
    or the whole new one, also after a kill, and with `durable` after a crash of the machine. An error leaves the
    old file, and nothing else.

        with replacing(path) as file:
            file.write(data)
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def torn_end(lines: Iterable[bytes]) -> bytes:
    """The last of `lines` where a kill or a full disk cut it short, else nothing."""
    last = b""
    for line in lines:
        last = line
    return b"" if last.endswith(b"\n") else last
