"""The file operations that a durable write is made of, one method each, and a file that is hashed while it is written.

Nothing in here decides anything: what has to be synced before what is the business of `checkpoint`. That it goes
through one object is for the tests, which put one in its place that fails at the n-th call, or remembers them all.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path

from eventloop.checkpoint.manifest import FileEntry

PIECE = 8 << 20
"""Bytes between two looks whether the save was given up, and between two requests to write back."""
BESIDE = 1 << 20
"""Bytes from which on hashing a piece on a second thread is worth the hand-over."""


CACHED = 256 << 10
"""Bytes that a core's own cache has room for."""


class SaveGivenUp(RuntimeError):
    """Nobody waits for this save any more."""


class Disk:
    """The operations, as the system has them. Every one may raise OSError."""

    def make_directory(self, path: Path) -> None:
        """Make one directory; its parent must be there."""
        path.mkdir()

    def create(self, path: Path) -> FileIO:
        """Open a new file without a buffer; one that is there is never written over."""
        return FileIO(path, "xb")

    def write(self, file: FileIO, data: memoryview) -> int:
        """Write, and return how many bytes were: it may be fewer."""
        return file.write(data) or 0

    def sync(self, file: FileIO) -> None:
        """Make a file's bytes durable."""
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable, on a file system that can sync one: some on a network cannot."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or directory another name, at once or not at all."""
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file, or a directory with what is in it."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


DISK = Disk()


class Sink:
    """A file being written, as `torch.save` wants one: it counts and hashes what goes through it.

    What is large is hashed on a second thread while it is written, which takes about as long.

    Attributes:
        size: bytes written so far.
        failure: what ended the writing; `torch.save` tells its caller only that it failed.
    """

    def __init__(self, disk: Disk, file: FileIO, given_up: threading.Event | None = None) -> None:
        self._disk, self._file, self._given_up = disk, file, given_up
        self._hash = hashlib.sha256()
        self._beside: ThreadPoolExecutor | None = None
        self.size = 0
        self.failure: Exception | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`.

        Raises:
            OSError: the disk is full, ...
            SaveGivenUp: `given_up` was set.
        """
        view = memoryview(data).cast("B")
        try:
            if len(view) < BESIDE:
                self._hash.update(view)
                self._write_pieces(view)
            else:
                self._write_beside_the_hash(view)
        except Exception as error:
            self.failure = error
            raise
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""

    def entry(self) -> FileEntry:
        """What was written, for the manifest."""
        return FileEntry(bytes=self.size, sha256=self._hash.hexdigest())

    def close(self) -> None:
        """Let the second thread go."""
        self._let_second_thread_go()

    def _let_second_thread_go(self) -> None:
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.shutdown(cancel_futures=True)  # what no thread was started for

    def _write_beside_the_hash(self, view: memoryview) -> None:
        """Neither waits for the other before the end: a piece that took the one long may take the other little."""
        failed = threading.Event()
        try:
            self._beside = self._beside or ThreadPoolExecutor(1, "eventloop checkpoint hash")
            hashed = self._beside.submit(partial(self._hash_pieces, failed), view)
        except RuntimeError:  # the main thread has ended: executors take no more, 3.12 starts no thread
            self._let_second_thread_go()
            self._hash_pieces(failed, view)
            self._write_pieces(view)
            return
        try:
            self._write_pieces(view)
        except BaseException:
            failed.set()
            raise
        finally:
            hashed.result()  # it reads memory that is the caller's again once this returns

    def _hash_pieces(self, failed: threading.Event, view: memoryview) -> None:
        """By way of a buffer in the core's own cache: SHA-256 was measured at 1.1 GB/s of what lies in memory, at 1.8 of
        what is in the cache, where a copy brings it at 10."""
        cached = memoryview(bytearray(CACHED))
        for start in range(0, len(view), CACHED):
            if failed.is_set():
                return  # nobody asks for the hash of half a file
            piece = view[start : start + CACHED]
            part = cached[: len(piece)]
            part[:] = piece
            self._hash.update(part)

    def _write_pieces(self, view: memoryview) -> None:
        for start in range(0, len(view), PIECE):
            if self._given_up is not None and self._given_up.is_set():
                raise SaveGivenUp("the save was given up")
            piece = view[start : start + PIECE]
            self._write_all(piece)
            if len(piece) >= BESIDE:
                start_writing_back(self._file, self.size - len(piece), len(piece))

    def _write_all(self, piece: memoryview) -> None:
        while piece:
            written = self._disk.write(self._file, piece)
            if written <= 0:
                raise OSError(errno.EIO, "the file takes no more bytes", self._file.name)
            self.size += written
            piece = piece[written:]


def start_writing_back(file: FileIO, start: int, size: int) -> None:
    """Let the system begin to write what will be synced in the end anyway, and not keep it: a checkpoint is not read
    again, and its pages would push out the data set's."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # it is an advice: a file system or a sandbox may know none
            os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_DONTNEED)


def write_file(
    path: Path, write: Callable[[Sink], object], *, disk: Disk = DISK, given_up: threading.Event | None = None
) -> FileEntry:
    """Write a new file durably, and return its size and hash. Its name is durable only after `sync_directory`.

    Raises:
        FileExistsError: there is one of that name.
        OSError: the disk is full, ...
        SaveGivenUp: `given_up` was set.
    """
    with disk.create(path) as file:
        sink = Sink(disk, file, given_up)
        try:
            write(sink)
        finally:
            sink.close()
        disk.sync(file)
        return sink.entry()


def make_directories(path: Path, disk: Disk = DISK) -> None:
    """Make a directory and those above it that are missing, each durable in the one above it, up to the root of its
    file system: one that is there may have been made a moment ago, by somebody who did not sync it.

    Raises:
        OSError: one cannot be made, or its name not be made durable.
    """
    path = path.resolve()
    if not path.is_dir():
        make_directories(path.parent, disk)
        try:
            disk.make_directory(path)
        except FileExistsError:
            if not path.is_dir():
                raise
    elif _identity(path) in _durable or path.is_mount():
        return
    else:
        make_directories(path.parent, disk)
    with suppress(PermissionError):  # it may be written, but not listed, so nobody can sync it
        disk.sync_directory(path.parent)
    _durable.add(_identity(path))


_durable: set[tuple[str, int, int]] = set()


def _identity(path: Path) -> tuple[str, int, int]:
    found = path.stat()
    return str(path), found.st_dev, found.st_ino
