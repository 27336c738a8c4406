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
"""The number of bytes that are read at once to find the last line of a file."""


def open_appending(path: Path, is_torn: Callable[[bytes], bool]) -> FileIO:
    """Open a file of lines to append to, and create its folder.

    A kill or a full disk may have left a partial last line, which is removed with a warning. If the last line
    is complete without its line feed, the line feed is added.

    Args:
        is_torn: returns whether a last line that has no line feed is partial.
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
    """Write all of `data`, with one system call unless the system writes only a part of it.

    Raises:
        OSError: the data cannot be written, for example to a full disk; the error names the file.
    """
    remaining = memoryview(data)
    try:
        while remaining:
            remaining = remaining[file.write(remaining) :]
    except OSError as error:
        error.filename = os.fspath(file.name)  # Python names the file only if it could not be opened
        raise


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Write a new file that replaces `path` when the block ends.

    A reader of `path` finds either the old file or the complete new one, even after a kill. If the block
    raises an error, the old file stays.

        with replacing(path) as file:
            file.write(data)

    Args:
        durable: whether to flush the file to the disk, so that it is complete after a crash of the machine
            too.
    """
    temporary = temporary_path(path, "tmp")
    try:
        with open(temporary, "xb") as file:  # "x" refuses a name that exists, so no link is followed
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def cut_torn_line(descriptor: int, is_torn: Callable[[bytes], bool]) -> bytes:
    """Remove the last line if it has no line feed and `is_torn(line)` is true; return the removed bytes.

    The function changes neither a pipe or device, nor a file with the append-only attribute of its file
    system.
    """
    while True:
        begin, line = _unended_line(descriptor)
        if not line or not is_torn(line):
            return b""
        # a changed size means that another program is writing this line, so it is read again
        if os.fstat(descriptor).st_size == begin + len(line):
            try:
                os.ftruncate(descriptor, begin)
            except PermissionError:
                return b""
            return line


def _unended_line(descriptor: int) -> tuple[int, bytes]:
    """Return the offset and the bytes of a last line without a line feed.

    If there is no such line, return the file's end and b"". Of a file that is not a regular file, such as a
    pipe, return 0 and b"".
    """
    status = os.fstat(descriptor)
    begin = status.st_size if stat.S_ISREG(status.st_mode) else 0
    blocks: list[bytes] = []
    while begin:
        size = min(_BLOCK, begin)
        block = os.pread(descriptor, size, begin - size)
        _, newline, tail = block.rpartition(b"\n")
        blocks.append(tail)
        begin -= len(tail)
        if newline or len(block) < size:  # a short block means that another program has shortened the file
            break
    return begin, b"".join(reversed(blocks))
