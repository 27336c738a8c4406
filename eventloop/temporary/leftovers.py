"""Find and remove the temporary files and directories of saves whose process was killed.

A training does so when it begins, and each save does so once its checkpoint is durable. The name of a
temporary path contains the process that writes it (`eventloop.temporary.names`). The process that writes
checkpoints runs this module, so it imports only the standard library.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from eventloop.temporary.names import directory_time, process_of
from eventloop.temporary.process_identity import this_process
from eventloop.temporary.sync import sync_directory

ABANDONED_SECONDS = 3600.0
"""Seconds without a write after which a save counts as dead if its process cannot be looked up.

That is so for a process on another machine, and for the names of an earlier version.
"""
SILENT_SECONDS = 120.0
"""The limit in place of `ABANDONED_SECONDS` for the run that owns the directory.

It is shorter because no other run lives there: only a saver's process that outlived its trainer may write.
"""


def leftovers(directory: Path, process: int | None = None) -> list[Path]:
    """Return the temporary paths of killed or running saves in a directory.

    Args:
        process: the id of a process on this machine; if given, only its paths are returned.
    """
    paths = [path for path in directory.glob(".*") if process_of(path) is not None]
    return paths if process is None else [path for path in paths if _is_written_by(process, path)]


def _is_written_by(pid: int, path: Path) -> bool:
    """Return whether the process `pid` of this machine has created a temporary path."""
    writer = process_of(path)
    if writer is None or writer.pid != pid:
        return False
    return writer.process is None or writer.process.place == this_process().place


def is_alive(path: Path, *, owned: bool = False) -> bool:
    """Return whether a process may still be writing a temporary path.

    A process of this machine is looked up by its id and the time of its start. If that is impossible, as for
    another machine or a name of an earlier version, the time since the last write decides.

    Args:
        path: a path that `leftovers` returned.
        owned: whether this process owns the directory, so that no other run lives in it.
    """
    writer = process_of(path)
    if writer is None:
        return False
    if (lives := writer.lives) is not None:
        return lives
    limit = SILENT_SECONDS if owned else ABANDONED_SECONDS
    return abs(directory_time(path.parent) - _last_write(path)) < limit


def running_saves(directory: Path) -> list[Path]:
    """Return the unfinished checkpoint directories that other living processes of this machine write."""
    directories = [path for path in leftovers(directory) if path.suffix == ".tmp" and path.is_dir()]
    return [path for path in directories if _is_written_by_another(path)]


def _is_written_by_another(path: Path) -> bool:
    writer = process_of(path)
    return writer is not None and writer.pid != os.getpid() and bool(writer.lives)


def remove_dead(directory: Path, *, owned: bool = False) -> None:
    """Remove the leftovers of killed saves from a directory; skip those that cannot be removed."""
    paths: list[Path] = []
    with suppress(OSError):
        paths = leftovers(directory)
    for path in paths:
        with suppress(OSError):
            if not is_alive(path, owned=owned):
                remove(path)


def remove_unfinished(path: Path, process: int) -> None:
    """Remove the incomplete files of the checkpoint `path` that a process was writing.

    Checkpoints that the process was removing stay for `remove_dead`: their removal needs a sync of the
    directory, which may hang as the process does.

    Args:
        process: the id of the process, which runs on this machine.
    """
    for temporary in leftovers(path.parent, process):
        if temporary.suffix == ".tmp" and temporary.name.startswith(f".{path.name}."):
            with suppress(OSError):
                remove(temporary)


def remove(path: Path) -> None:
    """Remove a temporary file, or a directory with its contents.

    A checkpoint that is to be removed is first renamed to a path with the suffix ".old". The killed process
    may not have made that name durable, so this function does so before it removes the files.

    Raises:
        OSError: the path cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        from shutil import rmtree  # here, because the import takes 4 ms of the start of the saver's process

        if path.suffix == ".old":  # without the sync, a crash may bring back an incomplete checkpoint
            sync_directory(path.parent)
        rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _last_write(path: Path) -> float:
    """Return the time of the last write to a file, or to a directory and the files in it, as a Unix time.

    A file that is renamed or removed meanwhile is skipped, because its directory's time shows that change.
    """
    times = [0.0]
    with suppress(OSError):
        times.append(path.stat().st_mtime)
    with suppress(OSError):
        for file in path.iterdir() if path.is_dir() else ():
            with suppress(OSError):
                times.append(file.stat().st_mtime)
    return max(times)
