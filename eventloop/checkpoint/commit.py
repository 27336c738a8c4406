"""Make checkpoints durable: write their files, rename them into place, and remove those that they replace.

The saver's process runs this module, or the training process if there is no saver's process, so it imports
only the standard library. All input is bytes: the records of the payload and an encoded manifest.

All files of a checkpoint are written into a new directory with a temporary name, and synced at the same time.
Then the directory is renamed, and the new name is synced. A crash before the rename leaves the former
contents of the folder; a crash after it leaves the new checkpoint. After an error the new files are removed,
and a retry starts with new ones, because a system that failed to sync a file does not know which of its bytes
are on the disk.

A replaced checkpoint gets a temporary name, too, and is removed once that name is durable, so that a scan
never finds a part of it. The sync of the next save makes it durable, or `Removals.finish` if none follows.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, Protocol

from eventloop.checkpoint.archive import write_archive
from eventloop.checkpoint.disk import DISK, Disk, FileHash, Sink, make_directories, run_together
from eventloop.processes.shared_memory import Mapped, Record, mapped_records, memory_of, with_own_bytes
from eventloop.temporary.leftovers import remove_dead
from eventloop.temporary.names import temporary_path

PAYLOAD = "state.pth"
MANIFEST = "manifest.json"


class Save(NamedTuple):
    """The contents of one checkpoint, and the checkpoints to remove once it is durable.

    Attributes:
        path: the checkpoint's absolute path.
        records: the records of the payload.
        manifest: the encoded manifest, whose last field, `files`, is empty.
        replaces: checkpoints to remove, oldest first; those that do not exist are ignored.
        spares: the number of checkpoints in `replaces` that are kept, the newest existing ones.
    """

    path: Path
    records: tuple[Record, ...]
    manifest: bytes
    replaces: tuple[Path, ...] = ()
    spares: int = 0

    def memory(self) -> set[Mapped]:
        """Return the shared memory that the records name."""
        return memory_of(self.records)

    def mapped(self, memory: Mapping[Mapped, memoryview]) -> Save:
        """Return a save with views of shared memory; see `mapped_records`."""
        return self._replace(records=mapped_records(self.records, memory))

    def with_own_bytes(self) -> Save:
        """Return this save with copies of the tensors' bytes, so that the tensors may change."""
        return self._replace(records=with_own_bytes(self.records))

    def staged(self, disk: Disk, given_up: threading.Event | None) -> Staged:
        """Return the steps that make the checkpoint durable."""
        return Staged(self, disk, given_up)


class AnySave(Protocol):
    """A save that `commit` can write: of a whole checkpoint, of one rank's part of it, or a `Mark`."""

    @property
    def path(self) -> Path:
        """The checkpoint's absolute path."""

    @property
    def replaces(self) -> tuple[Path, ...]:
        """The checkpoints to remove, oldest first."""

    @property
    def spares(self) -> int:
        """The number of checkpoints in `replaces` that are kept, the newest existing ones."""

    def memory(self) -> set[Mapped]:
        """Return the shared memory in which bytes of the records are."""

    def mapped(self, memory: Mapping[Mapped, memoryview]) -> AnySave:
        """Return this save with views of shared memory in its records; see `mapped_records`."""

    def staged(self, disk: Disk, given_up: threading.Event | None) -> Staged:
        """Return the steps that make the checkpoint durable."""


class Outcome(NamedTuple):
    """The result of a save.

    Attributes:
        bytes: the size of `state.pth`, or of all that this rank has written of a sharded model.
        at: the `perf_counter` when the checkpoint became durable.
        error: the error of a failed save, or None.
        warnings: sentences about replaced checkpoints that could not be removed.
    """

    bytes: int = 0
    at: float = 0.0
    error: BaseException | None = None
    warnings: tuple[str, ...] = ()


class Removals:
    """Remove replaced checkpoints: rename them first, and delete them once the new names are durable."""

    def __init__(self, disk: Disk = DISK) -> None:
        self._disk = disk
        self._renamed: list[Path] = []

    def rename(self, paths: Sequence[Path], spares: int = 0) -> list[str]:
        """Give replaced checkpoints temporary names; return a sentence for each that could not be renamed.

        A path without a manifest is left alone: the names may come from the checkpoint that the run resumed
        from, which another program may have written.

        Args:
            paths: the checkpoints, oldest first.
            spares: the number of checkpoints that are kept, the newest existing ones.
        """
        existing = [path for path in paths if os.path.exists(path / MANIFEST)]  # `exists` raises no error
        errors = []
        for path in existing[: max(0, len(existing) - spares)]:
            temporary = temporary_path(path, "old")
            try:
                self._disk.rename(path, temporary)
            except FileNotFoundError:  # removed by hand meanwhile
                continue
            except OSError as error:
                errors.append(f"a checkpoint that was replaced could not be removed: {error}")
            else:
                self._renamed.append(temporary)
        return errors

    def remove(self) -> list[str]:
        """Remove the checkpoints whose temporary names are durable; return a sentence for each error."""
        renamed, self._renamed = self._renamed, []
        errors = []
        for path in renamed:
            try:
                self._disk.remove(path)
            except OSError as error:
                errors.append(f"a checkpoint that was replaced could not be removed: {error}")
        return errors

    def finish(self) -> list[str]:
        """Make the temporary names durable, and remove the checkpoints; return a sentence for each error."""
        if not self._renamed:
            return []
        try:
            for folder in dict.fromkeys(path.parent for path in self._renamed):
                self._disk.sync_directory(folder)
        except OSError as error:
            return [f"a checkpoint that was replaced could not be removed: {error}"]
        return self.remove()


def commit(
    saves: Sequence[AnySave],
    disk: Disk = DISK,
    given_up: threading.Event | None = None,
    removals: Removals | None = None,
) -> list[Outcome]:
    """Make checkpoints of one folder durable, in order; return the outcome of each.

    Each step is done for all checkpoints before the next step begins, so that the file system syncs them
    together. If one checkpoint fails, the others are still saved.

    Args:
        saves: the checkpoints, in the order of saving.
        disk: the file operations, which tests replace.
        given_up: an event that cancels the incomplete saves when another thread sets it.
        removals: gets the replaced checkpoints: the next call removes them, or the caller calls its `finish`
            if no other save follows. By default they are removed at once, which takes one more sync.
    """
    replaced = Removals(disk) if removals is None else removals
    staged = [save.staged(disk, given_up) for save in saves]
    try:
        for each in staged:
            each.attempt(lambda save: save.write())
        _sync_contents(staged)
        for each in staged:
            each.attempt(lambda save: save.rename_to_free_name())
        # this sync also makes the temporary names durable that the previous commit gave
        warnings = replaced.remove() if _sync_names(staged, disk) else []
        for each in staged:
            each.attempt(lambda save: save.replace_former())
        for each in staged:
            each.attempt(lambda save: save.rename_replaced(replaced))
        warnings += replaced.finish() if removals is None else []
        for folder in {save.path.parent for save in saves}:
            remove_dead(folder)
    finally:  # also after a KeyboardInterrupt
        for each in staged:
            each.end()
    outcomes = [each.outcome() for each in staged]
    last = [outcome._replace(warnings=(*outcome.warnings, *warnings)) for outcome in outcomes[-1:]]
    return [*outcomes[:-1], *last]


def _sync_contents(staged: Sequence[Staged]) -> None:
    """Make the files of all saves durable at the same time; an error of one fails its save only."""
    syncs = [(each, sync) for each in staged if each.under_way for sync in each.syncs()]
    errors = run_together([sync for _, sync in syncs])
    for (each, _), error in zip(syncs, errors, strict=True):
        if error is not None and each.error is None:
            each.fail(error)


def _sync_names(staged: Sequence[Staged], disk: Disk) -> bool:
    """Make the new names durable with one sync of their folder; if it fails, all these saves fail.

    Returns:
        Whether the folder was synced.
    """
    named = [each for each in staged if each.under_way]
    try:
        if named:
            disk.sync_directory(named[0].path.parent)
    except Exception as error:
        for each in named:
            each.fail(error)
        return False
    return bool(named)


class Staged:
    """The steps that make one checkpoint durable, and the files and names made so far."""

    def __init__(self, save: Save, disk: Disk, given_up: threading.Event | None) -> None:
        self.path, self._save, self._disk, self._given_up = save.path, save, disk, given_up
        self.error: Exception | None = None
        self._work: Path | None = None  # the path of the new directory under its temporary name
        self._name: Path | None = None  # its path after the first rename, with or without a number
        self._files: list[FileIO] = []  # open until they are synced
        self.size, self._at = 0, 0.0  # in bytes; the `perf_counter` when it became durable, 0.0 before
        self.done = False
        """True if the remaining steps are skipped, because there is nothing left to write or to rename."""
        self._warnings: list[str] = []

    @property
    def under_way(self) -> bool:
        """Return whether the remaining steps are to be done: no step has failed, and `done` is not set."""
        return self.error is None and not self.done

    def attempt(self, step: Callable[[Staged], None]) -> None:
        """Do a step unless an earlier step failed or nothing is left; an error in it fails the save."""
        if self.under_way:
            try:
                step(self)
            except Exception as error:
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """Record the error that fails the save, and remove the files written so far."""
        self.error = error
        self.end()

    def write(self) -> None:
        """Write all files into a new directory; the manifest comes last, as it has the payload's hash."""
        self.make_work_directory()
        self.write_whole({})

    def make_work_directory(self) -> Path:
        """Make the directory with the temporary name, and return its path."""
        make_directories(self.path.parent, self._disk)
        self._work = work = temporary_path(self.path, "tmp")
        self._disk.make_directory(work)
        return work

    def write_whole(self, others: dict[str, FileHash]) -> None:
        """Write the payload, then the manifest, which also has the hashes of the files in `others`."""
        records = mapped_records(self._save.records, {})
        files = {PAYLOAD: self.write_file(PAYLOAD, lambda sink: write_archive(records, sink)), **others}
        self.size = sum(file.bytes for file in files.values())
        manifest = seal(self._save.manifest, files)
        self.write_file(MANIFEST, lambda sink: sink.write(manifest))

    def write_file(self, name: str, write: Callable[[Sink], object]) -> FileHash:
        """Write a file of the new directory, which is synced later, and return its size and hash."""
        assert self._work is not None
        file = self._disk.create(self._work / name)
        self._files.append(file)
        sink = Sink(self._disk, file, self._given_up)
        write(sink)
        return sink.entry()

    def syncs(self) -> list[Callable[[], None]]:
        """Return functions that make the contents and the names of all files durable, in any order."""
        work = self._work
        assert work is not None
        files = [partial(self._disk.sync, file) for file in self._files]
        return [*files, lambda: self._disk.sync_directory(work)]

    def close_files(self) -> None:
        """Close the files that were written."""
        for file in self._files:
            file.close()
        self._files.clear()

    def rename_to_free_name(self) -> None:
        """Give the directory the checkpoint's name, or a numbered one while that name is taken."""
        assert self._work is not None
        self.close_files()
        numbered = (self.path.with_name(f"{self.path.name}-{n}") for n in itertools.count(1))
        names = itertools.chain([self.path], numbered)
        self._name = next(name for name in names if not name.exists())
        self._disk.rename(self._work, self._name)

    def replace_former(self) -> None:
        """Replace a former checkpoint of the same name, now that the new one is durable."""
        if self._name != self.path:
            self._replace_former()
        self._at = perf_counter()

    def _replace_former(self) -> None:
        """Replace the former checkpoint by the durable one; restore it after an error."""
        assert self._name is not None
        former = temporary_path(self.path, "old")
        try:
            with suppress(FileNotFoundError):  # removed meanwhile
                self._disk.rename(self.path, former)
            self._disk.rename(self._name, self.path)
            self._disk.sync_directory(self.path.parent)
            self._disk.remove(former)
        except OSError as error:
            if self._name.exists():
                if former.exists() and not self.path.exists():
                    self._disk.rename(former, self.path)
                raise
            self._warnings.append(
                f"{self.path} is saved, but the former checkpoint of that name could not be removed: {error}"
            )

    def rename_replaced(self, removals: Removals) -> None:
        """Give temporary names to the checkpoints that the new one replaces; errors become warnings."""
        self._warnings += removals.rename(self._save.replaces, self._save.spares)

    def end(self) -> None:
        """Close the files, and remove them unless the checkpoint is durable."""
        self.close_files()
        if self._work is None:
            return
        if self._at:
            return
        moved = self._name is not None and not self._work.exists()  # else the name is another program's
        with suppress(OSError):  # files that stay do no harm: a scan skips temporary names
            self._disk.remove(self._work)
        if moved and self._name is not None and (self._name == self.path or self.path.exists()):
            with suppress(OSError):
                remove_checkpoint(self._name, self._disk)
        self._work = None

    def outcome(self) -> Outcome:
        """Return the result of the save, after all steps."""
        return Outcome(self.size, self._at, self.error, tuple(self._warnings))


def seal(manifest: bytes, files: dict[str, FileHash]) -> bytes:
    """Return the bytes of `manifest.json`: the SHA-256, then the manifest with its files filled in.

    Args:
        manifest: the manifest as JSON, whose last field, `files`, is empty.
        files: the size and hash of each file, by name.
    """
    head = manifest.removesuffix(b"{}}")
    assert head != manifest, "the manifest's last field is not an empty `files`"
    entries = [f'"{name}":{{"bytes":{each.bytes},"sha256":"{each.sha256}"}}' for name, each in files.items()]
    return sealed("manifest", head + b"{" + ",".join(entries).encode() + b"}}")


def sealed(field: str, body: bytes) -> bytes:
    """Return the bytes of a JSON file that has `body` under `field`, and its SHA-256 before it."""
    return b'{"sha256":"%s","%s":%s}' % (hashlib.sha256(body).hexdigest().encode(), field.encode(), body)


def remove_checkpoint(path: Path, disk: Disk = DISK) -> None:
    """Remove a checkpoint; rename it durably first, so that a scan never finds a part of it.

    Raises:
        OSError: the checkpoint cannot be removed.
    """
    if not path.is_dir():
        disk.remove(path)
        return
    temporary = temporary_path(path, "old")
    disk.rename(path, temporary)
    disk.sync_directory(path.parent)
    disk.remove(temporary)
