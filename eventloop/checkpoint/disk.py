"""Write files durably: single file operations, and a file that is hashed while it is written.

`commit`, `directory` and publishing use it, and decide the order of the syncs. All operations go through one
`Disk` object, which a test can replace to fail at the n-th call or to record all calls. The saver's process
runs this module, so it imports only the standard library.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from eventloop.temporary.sync import sync_directory

PIECE = 8 << 20
"""The bytes written between two checks for a cancellation, and between two requests to write back."""
LARGE = 1 << 20
"""The size in bytes from which data are hashed on a second thread, whose start costs more for fewer bytes."""
CACHED = 256 << 10
"""The size in bytes of the parts in which data are hashed; a part fits into the cache of one CPU core."""


class SaveGivenUp(RuntimeError):
    """A save was cancelled before it was complete, because the run is aborted or the program ends."""


class FileHash(NamedTuple):
    """The size of a file and the SHA-256 of its bytes."""

    bytes: int
    sha256: str


class Disk:
    """The file operations of a durable write, as system calls. Each may raise OSError."""

    def make_directory(self, path: Path) -> None:
        """Make one directory, whose parent must exist."""
        path.mkdir()

    def create(self, path: Path) -> FileIO:
        """Create a file and open it unbuffered; raise FileExistsError if it exists."""
        return FileIO(path, "xb")

    def write(self, file: FileIO, data: memoryview) -> int:
        """Write to a file, and return the number of bytes written, which may be fewer than given."""
        return file.write(data) or 0

    def sync(self, file: FileIO) -> None:
        """Make a file's bytes durable."""
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable; do nothing on network file systems that cannot sync it."""
        sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or directory atomically."""
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file if it exists, or a directory with its contents."""
        if path.is_dir() and not path.is_symlink():
            from shutil import rmtree  # here, as the import takes 4 ms of the start of the saver's process

            rmtree(path)
        else:
            path.unlink(missing_ok=True)


DISK = Disk()


class Sink:
    """Count and hash the bytes that `torch.save` or other code writes to a file.

    Large pieces are hashed on a second thread while they are written; hashing takes about as long as writing.

    Args:
        disk: the file operations.
        file: the file to write to.
        given_up: an event that cancels the write when another thread sets it.

    Attributes:
        size: the number of bytes written so far.
    """

    def __init__(self, disk: Disk, file: FileIO, given_up: threading.Event | None = None) -> None:
        self._disk, self._file, self._given_up = disk, file, given_up
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`.

        Raises:
            OSError: the disk is full, or another error of the file system.
            SaveGivenUp: `given_up` was set.
        """
        view = memoryview(data).cast("B")
        if len(view) < LARGE:
            self._hash.update(view)
            self._write_pieces(view)
        else:
            self._write_and_hash(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing, because the file has no buffer."""

    def entry(self) -> FileHash:
        """Return the size and hash of the written bytes, for the manifest."""
        return FileHash(self.size, self._hash.hexdigest())

    def _write_and_hash(self, view: memoryview) -> None:
        """Write data while a second thread hashes them; return when both are done."""
        failed = threading.Event()  # set if the write fails, so that the second thread stops
        name = "eventloop checkpoint hash"
        hasher = threading.Thread(target=self._hash_pieces, args=(failed, view), name=name, daemon=True)
        try:
            hasher.start()
        except RuntimeError:  # Python 3.12 starts no thread once the main thread has ended
            self._hash_pieces(failed, view)
            self._write_pieces(view)
            return
        try:
            self._write_pieces(view)
        except BaseException:
            failed.set()
            raise
        finally:
            hasher.join()  # the thread reads memory that the caller may reuse once this returns

    def _hash_pieces(self, failed: threading.Event, view: memoryview) -> None:
        """Hash data through a buffer in the CPU core's cache; stop when `failed` is set.

        Measured: SHA-256 takes 1.1 GB/s from memory and 1.8 GB/s from the cache; the copy into the cache runs
        at 10 GB/s.
        """
        buffer = memoryview(bytearray(CACHED))
        for start in range(0, len(view), CACHED):
            if failed.is_set():
                return  # the hash of an incomplete file is not used
            piece = view[start : start + CACHED]
            cached = buffer[: len(piece)]
            cached[:] = piece
            self._hash.update(cached)

    def _write_pieces(self, view: memoryview) -> None:
        """Write the bytes in pieces, so that a save that was given up ends soon."""
        for start in range(0, len(view), PIECE):
            if self._given_up is not None and self._given_up.is_set():
                raise SaveGivenUp("the save was given up")
            piece = view[start : start + PIECE]
            self._write_all(piece)
            if len(piece) >= LARGE:
                start_writing_back(self._file, self.size - len(piece), len(piece))

    def _write_all(self, piece: memoryview) -> None:
        """Write a whole piece, in several calls if the disk takes less at a time."""
        while piece:
            written = self._disk.write(self._file, piece)
            if written <= 0:
                raise OSError(errno.EIO, "the file takes no more bytes", self._file.name)
            self.size += written
            piece = piece[written:]


def start_writing_back(file: FileIO, start: int, size: int) -> None:
    """Request the system to write a part of a file to the disk now, and to drop it from the page cache.

    The final sync then has less to write. A checkpoint is rarely read again, and its pages would evict pages
    of the data set.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # it is only advice, which a file system or a sandbox may refuse
            os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_DONTNEED)


def write_file(path: Path, write: Callable[[Sink], object], *, disk: Disk = DISK) -> FileHash:
    """Write a new file durably, and return its size and hash.

    The name of the file is durable only after `sync_directory`.

    Raises:
        FileExistsError: the path exists.
        OSError: the disk is full, or another error of the file system.
    """
    with disk.create(path) as file:
        sink = Sink(disk, file)
        write(sink)
        disk.sync(file)
        return sink.entry()


def run_together(works: Sequence[Callable[[], None]]) -> list[Exception | None]:
    """Run functions at the same time; once all have ended, return the error of each, or None.

    Several syncs then take as long as the longest one, and not as long as all of them in a row.
    """
    errors: list[Exception | None] = [None] * len(works)

    def run(number: int) -> None:
        """Call the function of this number, and store its error for the calling thread."""
        try:
            works[number]()
        except Exception as error:
            errors[number] = error

    threads = []
    for number in range(1, len(works)):
        thread = threading.Thread(target=run, args=(number,), name="eventloop checkpoint sync", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python 3.12 starts no thread once the main thread has ended
            run(number)
        else:
            threads.append(thread)
    if works:
        run(0)
    for thread in threads:
        thread.join()
    return errors


def make_directories(path: Path, disk: Disk = DISK) -> None:
    """Create a directory and its missing parents, and make their names durable.

    The names of existing parents are also made durable, up to the mount point, because another program may
    have just created them without a sync. This is done once for each directory in a process (`_durable`).

    Raises:
        OSError: a directory cannot be created, or its name cannot be made durable.
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
    with suppress(PermissionError):  # a folder that may be written but not listed cannot be synced
        disk.sync_directory(path.parent)
    _durable.add(_identity(path))


_durable: set[tuple[str, int, int]] = set()
"""The directories that this process has made durable, by the result of `_identity`."""


def _identity(path: Path) -> tuple[str, int, int]:
    """Return the path of a directory and the numbers by which the system distinguishes it from others."""
    status = path.stat()
    return str(path), status.st_dev, status.st_ino
