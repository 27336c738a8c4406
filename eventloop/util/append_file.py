"""Append to files without a buffer, so that written bytes survive a kill of the process."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from eventloop.temporary.names import temporary_path

logger = logging.getLogger("eventloop")

_BLOCK = 1 << 16


def open_appending(path: Path, is_torn: Callable[[bytes], bool]) -> FileIO:
    """Open a file of lines to append to, and create its folder.

    If the last line is partial, because of a kill or a full disk, it is removed with a warning. If only its
    line feed is missing, that is added.

    Args:
        is_torn: a function that returns whether a line without a line feed is a partial line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = FileIO(path, "ab+")
    try:
        if removed := cut_torn_line(file.fileno(), is_torn):
            logger.warning(
                "%s: removed the last %s bytes, a partial line that a kill or a full disk left",
                path,
                f"{len(removed):,}",
            )
        if _unended_line(file.fileno())[1]:
            write_all(file, b"\n")
    except BaseException:
        file.close()
        raise
    return file


def write_all(file: FileIO, data: bytes) -> None:
    """Write all of `data`; one system call is enough unless the system writes only a part.

    Raises:
        OSError: the data cannot be written, for example to a full disk; the error names the file.
    """
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        error.filename = os.fspath(file.name)  # Python sets it only for a file that cannot be opened
        raise


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Write a new file that replaces `path` when the block ends.

    A reader of `path` finds either the old file or the complete new one, even after a kill. If the block
    raises an error, the old file stays.

        with replacing(path) as file:
            file.write(data)

    Args:
        durable: whether this also holds after a crash of the machine, for which the file is flushed to disk.
    """
    temporary = temporary_path(path, "tmp")
    try:
        with open(temporary, "xb") as file:  # a link of that name is never written through
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def cut_torn_line(descriptor: int, is_torn: Callable[[bytes], bool]) -> bytes:
    """Remove the last line if it has no line feed and `is_torn` returns True; return the removed bytes.

    A file that is not a regular file, or that may only grow, is not changed.
    """
    while True:
        begin, line = _unended_line(descriptor)
        if not line or not is_torn(line):
            return b""
        # if the size has changed, another program is writing this line: look again
        if os.fstat(descriptor).st_size == begin + len(line):
            try:
                os.ftruncate(descriptor, begin)
            except PermissionError:
                return b""
            return line


def _unended_line(descriptor: int) -> tuple[int, bytes]:
    """Return the offset and the bytes of the last line if it has no line feed, else no bytes."""
    status = os.fstat(descriptor)
    begin = status.st_size if stat.S_ISREG(status.st_mode) else 0
    blocks: list[bytes] = []
    while begin:
        size = min(_BLOCK, begin)
        block = os.pread(descriptor, size, begin - size)
        _, newline, tail = block.rpartition(b"\n")
        blocks.append(tail)
        begin -= len(tail)
        if newline or len(block) < size:  # a short block: another program has shortened the file
            break
    return begin, b"".join(reversed(blocks))
