"""A disk that remembers what is asked of it, and fails when it is told to."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from eventloop.checkpoint.disk import Disk, make_directories


def no_space() -> OSError:
    """What a full disk says."""
    return OSError(errno.ENOSPC, "No space left on device")


class RecordingDisk(Disk):
    """Notes every operation with the names it concerns, before it is done; the numbers that are in names aside are
    left out.

    Attributes:
        calls: as texts: "sync .a.tmp/state.pth".
        before: called with each of them.
        fail_at: the number of the operation that fails, counted from 0.
    """

    def __init__(
        self, root: Path, fail_at: int | None = None, error: Callable[[], Exception] = no_space
    ) -> None:
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda call: None
        make_directories(root)  # what is above it is not noted
        self._root, self._fail_at, self._error = root, fail_at, error

    def make_directory(self, path: Path) -> None:
        """See `Disk`."""
        self._record("make", path)
        super().make_directory(path)

    def create(self, path: Path) -> FileIO:
        """See `Disk`."""
        self._record("create", path)
        return super().create(path)

    def write(self, file: FileIO, data: memoryview) -> int:
        """See `Disk`; several writes to a file in a row are one call."""
        call = f"write {self._name(Path(str(file.name)))}"
        if not self.calls or self.calls[-1] != call:
            self._record("write", Path(str(file.name)))
        return super().write(file, data)

    def sync(self, file: FileIO) -> None:
        """See `Disk`."""
        self._record("sync", Path(str(file.name)))
        super().sync(file)

    def sync_directory(self, path: Path) -> None:
        """See `Disk`."""
        self._record("sync directory", path)
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        """See `Disk`."""
        self._record("rename", source, target)
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        """See `Disk`."""
        self._record("remove", path)
        super().remove(path)

    def _record(self, what: str, *paths: Path) -> None:
        call = f"{what} {' -> '.join(map(self._name, paths))}"
        number = len(self.calls)
        self.calls.append(call)
        self.before(call)
        if number == self._fail_at:
            raise self._error()

    def _name(self, path: Path) -> str:
        parts = Path(os.path.relpath(path, self._root)).parts
        return "/".join(_without_numbers(part) for part in parts) or "."


def _without_numbers(name: str) -> str:
    if not name.strip(".") or not name.startswith("."):
        return name
    *stem, _, why = name.split(".")
    return ".".join([*stem, why])
