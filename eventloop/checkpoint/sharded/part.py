"""Write one rank's part of a checkpoint that several ranks write together, and let rank 0 complete it.

    .epoch_3.<token of the run>-<number>.tmp/       all ranks write here; any rank may make the directory
        __1_0.distcp, rank_1.pth, vote_1.json       of each rank; the vote comes last, and rank 0 has none
        index.json, .metadata, state.pth            of rank 0, once all ranks have voted
        manifest.json                               last; then the directory is renamed to epoch_3

A vote says that the files of its rank are durable, or why they could not be written (`votes`). A rank other
than 0 is done when it has voted; only rank 0 learns whether the checkpoint is saved. A crash before the
rename leaves a hidden directory, and a crash after it a complete checkpoint. The saver's process runs this
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
    """A file of one rank: archives in `torch.save`'s format, one after the other, each as its records."""

    name: str
    archives: tuple[tuple[Record, ...], ...]


class PartSave(NamedTuple):
    """One rank's part of a checkpoint.

    Attributes:
        whole: the save of the checkpoint itself: its path, and on rank 0 its payload and manifest.
        work: the temporary directory that all ranks write to, which rank 0 renames at the end.
        rank, ranks: the number of this rank, and the number of ranks.
        form: a hash of the names, shapes, types and placements of all tensors; the same on all ranks.
        files: the files of this rank.
        common: the names and the bytes of other files that rank 0 writes; empty on other ranks.
        patience: the seconds for which rank 0 waits for other ranks while their files do not grow.
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
        """Return the shared memory in which bytes of the records are."""
        archives = (archive for file in self.files for archive in file.archives)
        return self.whole.memory().union(*map(memory_of, archives))

    def mapped(self, memory: Mapping[Mapped, memoryview]) -> PartSave:
        """Return this save with views of shared memory in its records; see `mapped_records`."""
        return self._with(lambda records: mapped_records(records, memory))

    def with_own_bytes(self) -> PartSave:
        """Return this save with copies of the tensors' bytes, so that the tensors may change."""
        return self._with(with_own_bytes)

    def _with(self, change: Callable[[tuple[Record, ...]], tuple[Record, ...]]) -> PartSave:
        """Return this save with the result of `change` in place of the records of each archive."""
        files = tuple(RankFile(name, tuple(map(change, archives))) for name, archives in self.files)
        return self._replace(whole=self.whole._replace(records=change(self.whole.records)), files=files)

    def staged(self, disk: Disk, given_up: threading.Event | None) -> Staged:
        """Return the steps that make the checkpoint durable."""
        return StagedPart(self, disk, given_up)


class StagedPart(Staged):
    """The steps that make one rank's part durable, and on rank 0 the whole checkpoint.

    If the saver's process dies during any step, a thread does the steps again from the first.
    """

    def __init__(self, save: PartSave, disk: Disk, given_up: threading.Event | None) -> None:
        super().__init__(save.whole, disk, given_up)
        self._part = save

    def write(self) -> None:
        """Write this rank's files and vote; on rank 0 wait for all votes, and write the other files.

        If a process that died has already voted, or on rank 0 renamed the directory, nothing is written.
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
        files = {name: entry for rank_vote in votes for name, entry in rank_vote.files.items()}
        for name, data in part.common:
            files[name] = self._write_new(name, partial(_write_bytes, data))
        _check_sizes(part.work, files)
        for stale in (PAYLOAD, MANIFEST):  # written by a process that died
            (part.work / stale).unlink(missing_ok=True)
        self.write_whole(files)

    def _has_voted(self) -> bool:
        """Return whether this rank has voted for the checkpoint, or rank 0 has already completed it."""
        vote = read_vote(self._part.work, self._part.rank)
        return (vote is not None and not vote.error) or self._renamed_before() is not None

    def _renamed_before(self) -> Path | None:
        """Return the path to which rank 0 has renamed the directory of all ranks; None if it has not."""
        if self._part.work.exists():
            return None
        numbered = sorted(self.path.parent.glob(f"{escape(self.path.name)}-*"))
        return next((path for path in (self.path, *numbered) if _is_of(self._part.work, path)), None)

    def _write_own(self) -> Vote:
        """Write this rank's files, make them durable, and return the vote, which other ranks than 0 write."""
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
        """Write a file; one of this name, which a process that died has written, is removed first."""
        with suppress(FileNotFoundError):
            (self._part.work / name).unlink()
        return self.write_file(name, write)

    def fail(self, error: Exception) -> None:
        """Record the error, remove this rank's files, and vote against the checkpoint."""
        part = self._part
        super().fail(error)
        if part.rank:
            for file in part.files:  # before the vote, which on a full disk needs the room of these files
                with suppress(OSError):
                    (part.work / file.name).unlink()
            with suppress(OSError):  # without the vote, rank 0 waits for `patience` seconds
                write_vote(part.work, part.rank, Vote(part.form, {}, error_text(error)), self._disk)

    def syncs(self) -> list[Callable[[], None]]:
        """Return functions that make this save's files durable; none if the directory was renamed before."""
        return [] if self._name is not None else super().syncs()

    def rename_to_free_name(self) -> None:
        """Give the directory the checkpoint's name, unless a process that died has done so."""
        if self._name is None:
            super().rename_to_free_name()

    def rename_replaced(self, removals: Removals) -> None:
        """Give temporary names to replaced checkpoints, and remove directories of earlier failed saves."""
        super().rename_replaced(removals)
        for path in leftovers(self.path.parent):
            # rank 0 has ended that save before this one, but a slow rank may have written to it since
            if is_earlier_of_ranks(path, self._part.work):
                with suppress(OSError):
                    self._disk.remove(path)
        # This removes the directories of earlier runs whose ranks were killed. The run owns the folder, so no
        # other run is writing there, and a short time without a write shows that a directory is left over.
        remove_dead(self.path.parent, owned=True)

    def _finish(self) -> None:
        """End the save on a rank other than 0, which has no more to do once it has voted."""
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
        NoCheckpointError: a file is missing or has another size, for example because somebody removed the
            directory, and a rank made it again.
    """
    for name, entry in files.items():
        size = (work / name).stat().st_size if (work / name).exists() else None
        if size != entry.bytes:
            finds = "does not find it" if size is None else f"finds {size}"
            raise NoCheckpointError(
                f"{work / name}: expected the {entry.bytes} bytes that its rank has written, rank 0 {finds}: "
                "the directory may have been removed meanwhile, or the ranks' hosts may see different ones"
            )


def _bytes_in(path: Path) -> int:
    """Return the bytes of the files that a checkpoint's manifest lists."""
    listed: Mapping[str, Mapping[str, int]] = json.loads((path / MANIFEST).read_bytes())["manifest"]["files"]
    return sum(file["bytes"] for file in listed.values())


def _is_of(work: Path, path: Path) -> bool:
    """Return whether the checkpoint `path` is the directory `work`, renamed, by the name in its manifest."""
    try:
        return f'"save":"{work.name}"'.encode() in (path / MANIFEST).read_bytes()
    except OSError:
        return False
