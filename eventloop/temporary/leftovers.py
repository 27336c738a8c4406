"""Find and remove what killed saves have left: temporary files and directories whose process has ended.

A training looks for them when it begins, and each save once it is durable. Which process writes a path is in
its name: `eventloop.temporary.names`. The saver's process runs this module, so it imports only the
standard library.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from eventloop.temporary.names import directory_time, process_of
from eventloop.temporary.process_identity import this_process
from eventloop.temporary.sync import sync_directory

ABANDONED_SECONDS = 3600.0
"""Seconds without a write after which a save on another machine, or of an earlier version, counts as dead."""
SILENT_SECONDS = 120.0
"""Seconds for the owner of the directory: only a saver process that outlived its trainer can be writing."""


def leftovers(directory: Path, process: int | None = None) -> list[Path]:
    """Return the temporary paths of killed or running saves in a directory.

    Args:
        process: the id of a process here, to return only those that it wrote.
    """
    found = [(path, process_of(path)) for path in directory.glob(".*")]
    here = this_process().place
    return [
        path
        for path, writer in found
        if writer is not None
        and (process is None or (writer.pid == process and (writer.process or this_process()).place == here))
    ]


def is_alive(path: Path, *, owned: bool = False) -> bool:
    """Return whether a process may still be writing a temporary path.

    A process here is looked up by its id and its start. Of a process elsewhere the last write decides, by the
    clock of the directory; so it does for a name of an earlier version with the id of a living process.

    Args:
        path: a path that `leftovers` returned.
        owned: whether this process owns the directory, so that no other run lives in it.
    """
    writer = process_of(path)
    if writer is None or (life := writer.lives) is False:
        return False
    if life is None:
        limit = SILENT_SECONDS if owned else ABANDONED_SECONDS
        return abs(directory_time(path.parent) - _last_write(path)) < limit
    return True


def running_saves(directory: Path) -> list[Path]:
    """Return the saves in a directory that other living processes of this machine have begun."""
    found = [(path, process_of(path)) for path in leftovers(directory) if path.suffix == ".tmp"]
    return [
        path
        for path, writer in found
        if writer is not None and writer.pid != os.getpid() and writer.lives and path.is_dir()
    ]


def remove_dead(directory: Path, *, owned: bool = False) -> None:
    """Remove the leftovers of killed saves from a directory; what cannot be removed stays."""
    found: list[Path] = []
    with suppress(OSError):
        found = leftovers(directory)
    for left in found:
        with suppress(OSError):
            if not is_alive(left, owned=owned):
                remove(left)


def remove_unfinished(path: Path, process: int) -> None:
    """Remove the incomplete files of one checkpoint that a process was writing.

    Checkpoints that it was removing are left to `remove_dead`: they need a sync, which may hang as it does.
    """
    for left in leftovers(path.parent, process):
        if left.suffix == ".tmp" and left.name.startswith(f".{path.name}."):
            with suppress(OSError):
                remove(left)


def remove(path: Path) -> None:
    """Remove a temporary file, or a directory with its contents.

    A process that ended between the rename of a checkpoint and its removal may not have made the rename
    durable, so that is done first.

    Raises:
        OSError: it cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        from shutil import rmtree  # 4 ms of the start of the saver's process

        if path.suffix == ".old":  # else a part of it may come back under its former name after a crash
            sync_directory(path.parent)
        rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _last_write(path: Path) -> float:
    """Return the time of the last write to a file, or to a directory and the files in it.

    A file that is renamed or removed meanwhile does not count: its directory was written at that moment.
    """
    times = [0.0]
    with suppress(OSError):
        times.append(path.stat().st_mtime)
    with suppress(OSError):
        for each in path.iterdir() if path.is_dir() else ():
            with suppress(OSError):
                times.append(each.stat().st_mtime)
    return max(times)
