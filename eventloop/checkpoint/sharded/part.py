"""Make a checkpoint durable that several ranks write together: each its own files, rank 0 also the rest.

    .epoch_3.<token of the run>-<number>.tmp/       all ranks write here; any rank may make the directory
        __1_0.distcp, rank_1.pth, vote_1.json       of each rank; the vote last, and none of rank 0
        index.json, .metadata, state.pth            of rank 0, once all ranks have voted
        manifest.json                               last; then the directory is renamed to epoch_3

A crash before the rename leaves a hidden directory, a crash after it a whole checkpoint. A rank other than 0
is done when it has voted; only rank 0 learns whether the checkpoint is saved. The saver's process runs this
module, so it imports only the standard library.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from glob import escape
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from eventloop.checkpoint.archive import write_archive
from eventloop.checkpoint.commit import MANIFEST, PAYLOAD, Removals, Save, Staged
from eventloop.checkpoint.disk import Disk, FileHash, Sink, make_directories, run_together
from eventloop.checkpoint.sharded.votes import (
    NoCheckpointError,
    Vote,
    await_votes,
    read_vote,
    vote_path,
    write_vote,
)
from eventloop.processes.shared_memory import Mapped, Record, mapped_records, memory_of, with_own_bytes
from eventloop.temporary.leftovers import leftovers, remove_dead
from eventloop.temporary.names import is_earlier_of_ranks
from eventloop.util.text import error_text

INDEX, METADATA = "index.json", ".metadata"


class RankFile(NamedTuple):
    """A file of one rank: archives of torch.save in a row, each as its records."""

    name: str
    archives: tuple[tuple[Record, ...], ...]


class PartSave(NamedTuple):
    """One rank's part of a checkpoint.

    Attributes:
        whole: the checkpoint, with the records that rank 0 writes; empty on other ranks.
        work: the directory that all ranks write to, which is renamed at last.
        rank, ranks: the number of this rank, and of all ranks.
        form: the names, shapes and types of all tensors, as a hash; the same on all ranks.
        files: the files of this rank.
        common: the names and the bytes of the files that rank 0 writes in addition.
        patience: the seconds for which rank 0 waits for a rank that does nothing.
    """

    whole: Save
    work: Path
    rank: int
    ranks: int
    form: str
    files: tuple[RankFile, ...]
    common: tuple[tuple[str, bytes], ...]
    patience: float

    @property
    def path(self) -> Path:
        """The checkpoint's absolute path."""
        return self.whole.path

    @property
    def replaces(self) -> tuple[Path, ...]:
        """The checkpoints to remove, oldest first."""
        return self.whole.replaces

    @property
    def spares(self) -> int:
        """The number of checkpoints in `replaces` that are kept, the newest existing ones."""
        return self.whole.spares

    def memory(self) -> set[Mapped]:
        """Return the shared memory that the records name."""
        archives = (archive for file in self.files for archive in file.archives)
        return self.whole.memory().union(*map(memory_of, archives))

    def mapped(self, memory: Mapping[Mapped, memoryview]) -> PartSave:
        """Return a save with views of shared memory; see `mapped_records`."""
        return self._with(lambda records: mapped_records(records, memory))

    def with_own_bytes(self) -> PartSave:
        """Return a save with copies of the tensors' bytes, so that the tensors may change."""
        return self._with(with_own_bytes)

    def _with(self, change: Callable[[tuple[Record, ...]], tuple[Record, ...]]) -> PartSave:
        files = tuple(RankFile(name, tuple(map(change, archives))) for name, archives in self.files)
        return self._replace(whole=self.whole._replace(records=change(self.whole.records)), files=files)

    def staged(self, disk: Disk, given_up: threading.Event | None) -> Staged:
        """Return the steps that make the checkpoint durable."""
        return StagedPart(self, disk, given_up)


class StagedPart(Staged):
    """The steps that make one rank's part durable, and on rank 0 the whole checkpoint.

    A thread repeats them if the saver's process died at any of them.
    """

    def __init__(self, save: PartSave, disk: Disk, given_up: threading.Event | None) -> None:
        super().__init__(save.whole, disk, given_up)
        self._part = save

    def write(self) -> None:
        """Write this rank's files and vote; on rank 0 wait for all votes, and write the other files.

        Nothing is written that a process which died has completed.
        """
        part = self._part
        if part.rank and self._has_voted():
            self._finish()
            return
        if not part.rank and (renamed := self._renamed_before()) is not None:
            self._work, self._name, self.size = part.work, renamed, _bytes_in(renamed)
            return
        make_directories(self.path.parent, self._disk)
        with suppress(FileExistsError):
            self._disk.make_directory(part.work)
        self._work = part.work
        vote = self._write_own()
        if part.rank:
            self._finish()
            return
        votes = await_votes(part.work, vote, part.ranks, part.patience, self._given_up)
        files = {name: entry for each in votes for name, entry in each.files.items()}
        for name, data in part.common:
            files[name] = self._write_new(name, partial(_write_bytes, data))
        _check_sizes(part.work, files)
        for stale in (PAYLOAD, MANIFEST):  # of a process that died
            (part.work / stale).unlink(missing_ok=True)
        self.write_whole(files)

    def _has_voted(self) -> bool:
        """Return whether this rank has voted for the checkpoint, or rank 0 has even completed it."""
        vote = read_vote(self._part.work, self._part.rank)
        return (vote is not None and not vote.error) or self._renamed_before() is not None

    def _renamed_before(self) -> Path | None:
        """Return the name that the directory of all ranks has now; None if it has no new name."""
        if self._part.work.exists():
            return None
        numbered = sorted(self.path.parent.glob(f"{escape(self.path.name)}-*"))
        return next((path for path in (self.path, *numbered) if _is_of(self._part.work, path)), None)

    def _write_own(self) -> Vote:
        """Write this rank's files, make them durable, and vote."""
        part = self._part
        files = {file.name: self._write_new(file.name, partial(_write_archives, file)) for file in part.files}
        for error in run_together(self.syncs()):
            if error is not None:
                raise error
        self.close_files()
        self.size = sum(entry.bytes for entry in files.values())
        vote = Vote(part.form, files)
        if part.rank:
            write_vote(part.work, part.rank, vote, self._disk)
        return vote

    def _write_new(self, name: str, write: Callable[[Sink], object]) -> FileHash:
        with suppress(FileNotFoundError):  # of a process that died
            (self._part.work / name).unlink()
        return self.write_file(name, write)

    def fail(self, error: Exception) -> None:
        """Record the error, remove this rank's files, and vote against the checkpoint."""
        part = self._part
        super().fail(error)
        if part.rank:
            for file in part.files:  # first, as on a full disk even the vote needs their room
                with suppress(OSError):
                    (part.work / file.name).unlink()
            with suppress(OSError):  # then rank 0 waits for its patience
                write_vote(part.work, part.rank, Vote(part.form, {}, error_text(error)), self._disk)

    def syncs(self) -> list[Callable[[], None]]:
        """Return functions that make the files of this save durable; none if they were before."""
        return [] if self._name is not None else super().syncs()

    def rename_to_free_name(self) -> None:
        """Give the directory the checkpoint's name, unless a process that died has done so."""
        if self._name is None:
            super().rename_to_free_name()

    def rename_replaced(self, removals: Removals) -> None:
        """Give temporary names to replaced checkpoints, and remove what slow ranks left of failed saves."""
        super().rename_replaced(removals)
        for left in leftovers(self.path.parent):
            if is_earlier_of_ranks(left, self._part.work):  # rank 0 has given it up
                with suppress(OSError):
                    self._disk.remove(left)
        remove_dead(self.path.parent, owned=True)  # of runs before this one, whose ranks were killed

    def _finish(self) -> None:
        self.close_files()
        self._work, self._at, self.done = None, perf_counter(), True

    def end(self) -> None:
        """Close the files; on rank 0 remove them unless the checkpoint is durable."""
        if self._part.rank:
            self.close_files()
        else:
            super().end()
            if self._at and self._name is not None:
                for rank in range(1, self._part.ranks):
                    with suppress(OSError):
                        vote_path(self.path, rank).unlink()


def _write_bytes(data: bytes, sink: Sink) -> None:
    sink.write(data)


def _write_archives(file: RankFile, sink: Sink) -> None:
    for archive in file.archives:
        write_archive(mapped_records(archive, {}), sink)


def _check_sizes(work: Path, files: Mapping[str, FileHash]) -> None:
    """Compare the sizes of all ranks' files with their votes.

    Raises:
        NoCheckpointError: one is missing or has another size, as after somebody removed the directory, and a
            rank made it again.
    """
    for name, entry in files.items():
        size = (work / name).stat().st_size if (work / name).exists() else None
        if size != entry.bytes:
            found = "does not find it" if size is None else f"finds {size}"
            raise NoCheckpointError(
                f"{work / name}: expected the {entry.bytes} bytes that its rank has written, rank 0 {found}: "
                "the directory may have been removed meanwhile, or the ranks' hosts may see different ones"
            )


def _bytes_in(path: Path) -> int:
    """Return the bytes of a checkpoint's files, as far as its manifest lists them."""
    listed: Mapping[str, Mapping[str, int]] = json.loads((path / MANIFEST).read_bytes())["manifest"]["files"]
    return sum(file["bytes"] for file in listed.values())


def _is_of(work: Path, path: Path) -> bool:
    """Return whether a checkpoint is the one that the ranks wrote in `work`, a directory renamed since."""
    try:
        return f'"save":"{work.name}"'.encode() in (path / MANIFEST).read_bytes()
    except OSError:
        return False
