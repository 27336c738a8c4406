"""A file that only grows, without a buffer of its own: what was written survives a kill of the process."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path


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
